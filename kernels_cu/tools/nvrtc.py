"""NVRTC, NVIDIA's compiler as a library: from the text of a kernel to a cubin or PTX."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")


class CompileError(Exception):
    """What the compiler said."""


@dataclass(frozen=True)
class Compiled:
    """What came out of one file for one target.

    Attributes
    ----------
    code : bytes
        A cubin, or PTX text without its final zero.
    ptx : str
        The PTX that the code was made of.
    log : str
        Warnings, and the assembler's report of registers and spills.
    """

    code: bytes
    ptx: str
    log: str


class Nvrtc:
    """The library, and where its headers are.

    Parameters
    ----------
    nvidia : Path
        The folder of the unpacked wheels.
    include : Path
        The kernels' own headers.
    """

    def __init__(self, nvidia: Path, include: Path) -> None:
        self._library = ctypes.CDLL(str(nvidia / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))
        folders = (include, nvidia / "cuda_runtime" / "include", nvidia / "cuda_cccl" / "include")
        self._options = [*OPTIONS, *(f"--include-path={folder}" for folder in folders)]

    def compile(self, source: Path, target: str) -> Compiled:
        """Compile a file for ``sm_XX`` (a cubin) or ``compute_XX`` (PTX).

        Raises
        ------
        CompileError
            With the compiler's messages.
        """
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._check(self._library.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None))
        try:
            options = [option.encode() for option in (f"--gpu-architecture={target}", *self._options)]
            array = (ctypes.c_char_p * len(options))(*options)
            status = self._library.nvrtcCompileProgram(program, len(options), array)
            log = self._get("ProgramLog", program).decode(errors="replace")
            if status:
                raise CompileError(f"{source.name} for {target}:\n{log}")
            ptx = self._get("PTX", program)
            code = self._get("CUBIN", program) if target.startswith("sm_") else ptx
            return Compiled(code, ptx.decode(), log)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        """Return one of the program's outputs; texts lose their final zero."""
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw if what == "CUBIN" else buffer.raw.rstrip(b"\0")

    def _check(self, status: int) -> None:
        if status:
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise CompileError(self._library.nvrtcGetErrorString(status).decode())
