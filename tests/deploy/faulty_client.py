"""A client's half whose client 2 is dishonest, each round in another way. Copied into an app's folder by a test."""

import struct
from pathlib import Path

from laconic_relay import RECORD, client_app

FAULTS = {1: "nan", 2: "model", 3: "cut", 4: "weight"}


def dishonest(message, context, call_next):
    reply = call_next(message, context)
    fault = FAULTS.get(int(message.metadata.group_id or 0))
    if context.node_config["partition-id"] != 2 or fault is None or not reply.content[RECORD]["payload"]:
        return reply
    from laconic.codecs.wire import HEADER_BYTES, Header, seal

    frame = reply.content[RECORD]["payload"]
    _, _, direction, codec, number, client, fingerprint, weight, _ = struct.unpack_from("<4sBBHII8sIQ", frame)
    payload = bytearray(frame[HEADER_BYTES:])
    fields = {"direction": direction, "codec": codec, "round": number, "client": client}
    match fault:
        case "nan":
            payload[:4] = struct.pack("<f", float("nan"))
        case "model":
            fingerprint = bytes(8)
        case "weight":
            weight = 4_000_000_000
    forged = seal(Header(**fields, fingerprint=fingerprint, weight=weight), bytes(payload))
    if fault == "cut":
        forged = forged[: len(forged) // 2]
    reply.content[RECORD]["payload"] = forged
    reply.content[RECORD]["lengths"] = str(len(forged))
    return reply


app = client_app(Path(__file__).with_name("run.toml"), mods=[dishonest])
