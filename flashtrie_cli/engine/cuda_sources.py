"""Kernel sources and what is compiled from them: digests, nvcc, and a cache of our own.

A compiled kernel is named after the digest of everything it was compiled from, so that an old one can never
be loaded for new sources. Runs without a GPU and without PyCUDA; CMake runs this module to package a part.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from flashtrie_cli.errors import EngineUnavailable

COMPILE_OPTIONS = ("-std=c++17", "-O3", "--fmad=false")
"""No contraction into fused multiply-adds: scores must round alike in every engine."""

PACKAGED_ARCHS = (75, 80, 90, 100, 120)
"""In a packaged fatbin, as far as nvcc knows them: others of the same major number run these, later ones the PTX."""

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALL_NVCC = "install the CUDA toolkit, or `pip install 'cuda-toolkit[nvcc,cccl,cudart,crt,nvvm]'`"


def source_root() -> Path:
    """The folder with ``flashtrie/`` (shared headers) and ``kernels/``: packaged, or the checkout's."""
    for folder in (_PACKAGE / "_cuda_sources", _PACKAGE.parent / "cuda"):
        if (folder / "kernels").is_dir():
            return folder
    raise EngineUnavailable("the kernel sources are missing", hint="reinstall flashtrie")


def source_digest(part: str) -> str:
    """16 hex digits over the kernel file, every shared header and the compile options."""
    root = source_root()
    kernel = root / "kernels" / f"{part}.cu"
    if not kernel.is_file():
        raise EngineUnavailable(f"there are no kernels called {part!r}", hint=f"expected {kernel}")
    digest = hashlib.sha256(" ".join(COMPILE_OPTIONS).encode())
    for path in [*sorted((root / "flashtrie").glob("*.cuh")), kernel]:
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def packaged_kernel(part: str) -> Path | None:
    """The fatbin built at install, if there is one and it was built from these very sources."""
    folder = _PACKAGE / "_kernels"
    fatbin, digest = folder / f"{part}.fatbin", folder / f"{part}.digest"
    try:
        built_from = digest.read_text().strip()
    except OSError:
        return None
    return fatbin if built_from == source_digest(part) and fatbin.is_file() else None


def cache_folder() -> Path:
    """Where compiled kernels are kept: ``$FLASHTRIE_CACHE``, else the user's cache folder."""
    named = os.environ.get("FLASHTRIE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "flashtrie" / "kernels"


def find_nvcc() -> Path | None:
    """nvcc from ``$FLASHTRIE_NVCC``, ``$CUDA_HOME``, PATH, or pip's ``nvidia`` packages, in this order."""
    candidates = [os.environ.get("FLASHTRIE_NVCC")]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        candidates.append(os.path.join(home, "bin", "nvcc") if home else None)
    candidates.append(shutil.which("nvcc"))
    for folder in sys.path:
        candidates.extend(str(path) for path in sorted(Path(folder or ".").glob("nvidia/cu*/bin/nvcc")))
    candidates.append("/usr/local/cuda/bin/nvcc")
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate)
    return None


def nvcc_version(nvcc: Path) -> str:
    """Such as ``13.0.88``; EngineUnavailable where nvcc cannot be run."""
    try:
        shown = subprocess.run(
            [str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineUnavailable(f"{nvcc} cannot be run: {error}", hint=_INSTALL_NVCC) from error
    found = re.search(r"V(\d+(?:\.\d+)+)", shown)
    if not found:
        raise EngineUnavailable(f"{nvcc} does not say its version", hint=_INSTALL_NVCC)
    return found.group(1)


def _supported_archs(nvcc: Path) -> list[int]:
    try:
        shown = subprocess.run(
            [str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineUnavailable(f"{nvcc} cannot be run: {error}", hint=_INSTALL_NVCC) from error
    return sorted({int(arch) for arch in re.findall(r"compute_(\d+)", shown.stdout)})


def cached_kernel(part: str, arch: int) -> Path:
    """The cubin of a part for compute capability ``arch`` (90 for 9.0), compiled now unless the cache has it.

    The file appears whole or not at all: compiled beside, then renamed. Where there is no nvcc, a cached
    cubin of the same sources serves, whichever nvcc made it. EngineUnavailable says what is missing.
    """
    digest = source_digest(part)
    folder = cache_folder()
    stem = f"{part}-{digest}-sm_{arch}"
    nvcc = find_nvcc()
    if nvcc is None:
        cached = sorted(folder.glob(f"{stem}-nvcc*.bin"))
        if cached:
            return cached[-1]
        raise EngineUnavailable(
            f"no {part} kernels for compute capability {arch // 10}.{arch % 10}, and no nvcc to compile them",
            hint=_INSTALL_NVCC,
        )
    target = folder / f"{stem}-nvcc{nvcc_version(nvcc)}.bin"
    if not target.is_file():
        compile_kernel(part, nvcc, arch, target)
    return target


def compile_kernel(part: str, nvcc: Path, arch: int, target: Path, extra: tuple[str, ...] = ()) -> None:
    """Compile one part for one architecture into ``target``; PTX where the GPU is newer than nvcc knows."""
    supported = _supported_archs(nvcc)
    older = [known for known in supported if known <= arch]
    if not older:
        raise EngineUnavailable(
            f"this nvcc compiles for compute capability {supported[0] // 10}.{supported[0] % 10} and newer, "
            f"the GPU has {arch // 10}.{arch % 10}",
            hint="an older CUDA toolkit, or --engine cpu",
        )
    kind = ["-cubin", f"-arch=sm_{arch}"] if arch in supported else ["-ptx", f"-arch=compute_{older[-1]}"]
    root = source_root()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".compiling-") as scratch:
            output = Path(scratch) / "kernel"
            command = [str(nvcc), *COMPILE_OPTIONS, *extra, *kind, "-I", str(root), "-o", str(output)]
            done = subprocess.run(
                [*command, str(root / "kernels" / f"{part}.cu")], capture_output=True, text=True
            )
            if done.returncode != 0:
                first = next(
                    (line for line in done.stderr.splitlines() if "error" in line.lower()), done.stderr[:300]
                )
                raise EngineUnavailable(f"nvcc could not compile the {part} kernels: {first.strip()}")
            os.replace(output, target)
    except OSError as error:
        raise EngineUnavailable(
            f"compiled kernels cannot be kept in {target.parent}: {error.strerror}",
            hint="FLASHTRIE_CACHE names another folder",
        ) from error


def build_fatbin(part: str, folder: Path) -> None:
    """``PART.fatbin`` and ``PART.digest`` for a package. Without a working nvcc an empty digest, and a warning."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = folder / f"{part}.digest"
    digest.write_text("")
    try:
        nvcc = find_nvcc()
        if nvcc is None:
            raise EngineUnavailable("no nvcc", hint=_INSTALL_NVCC)
        archs = [arch for arch in _supported_archs(nvcc) if arch in PACKAGED_ARCHS]
        targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        root = source_root()
        output = folder / f"{part}.fatbin"
        command = [str(nvcc), *COMPILE_OPTIONS, "-fatbin", "--threads", "0", "-compress-mode=size", *targets]
        command += ["-I", str(root), "-o", str(output), str(root / "kernels" / f"{part}.cu")]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (EngineUnavailable, OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        warnings.warn(
            f"the {part} kernels are not packaged but compiled at first use: {detail}", stacklevel=1
        )
        return
    digest.write_text(source_digest(part) + "\n")


if __name__ == "__main__":
    build_fatbin(sys.argv[1], Path(sys.argv[2]))
