// Browsers refuse workers to pages that were opened from a file, and the search is one: there, a hidden frame runs it.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<body></body>"
      this.frame.onload = () => {
        const inside = this.frame.contentWindow
        inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        const element = inside.document.createElement("script")
        element.src = script
        element.onload = () => {
          this.ready = true
          this.waiting.splice(0).forEach(data => this.postMessage(data))
        }
        inside.document.body.append(element)
      }
      const place = () => document.body.append(this.frame)
      document.body ? place() : addEventListener("DOMContentLoaded", place)
    }

    postMessage(data) {
      if (!this.ready) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
