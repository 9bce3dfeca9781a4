# SPDX-License-Identifier: Apache-2.0
"""Loads object files into the kernel: sets read-only data and sizes, loads, finds programs, maps and arenas, and has
the kernel count run times.

Nothing is pinned unless asked. Everything ends with the process, and no bpffs is needed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from sennit.closing import Closing
from sennit.ebpf.arena import BPF_MAP_TYPE_ARENA, Arena, pages
from sennit.ebpf.btf import Btf, BtfError
from sennit.ebpf.elf import Elf, ElfError
from sennit.ebpf.library import BpfError, clear_log, library, refusal
from sennit.ebpf.maps import BpfMap
from sennit.ebpf.trial import Trial, run_program, send_frames

# uapi/linux/bpf.h, enum bpf_stats_type.
_BPF_STATS_RUN_TIME: Final = 0
# uapi/linux/bpf.h (Linux 5.18): the XDP program takes packets in several pieces.
_XDP_HAS_FRAGMENTS: Final = 1 << 5


class RunTimes(Closing):
    """While one of these is open, the kernel counts runs and their time, of all programs of the machine (Linux 5.8).

    It reads a clock twice for each run, which takes 20 to 50 ns. It stops when the last one is closed, or its process
    ends: nothing is left switched on, as `sysctl kernel.bpf_stats_enabled` would be.
    """

    def __init__(self) -> None:
        """Raises BpfError without CAP_SYS_ADMIN."""
        self._descriptor: int | None = None
        found = library().bpf_enable_stats(_BPF_STATS_RUN_TIME)
        if found < 0:
            raise refusal(-found, "run times of BPF programs: the kernel does not count them")
        self._descriptor = found

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class ProgramStatistics:
    """What the kernel counts while `RunTimes` are open. The time includes reading the clock."""

    run_time_ns: int
    runs: int


class Program:
    """A program of a loaded object."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.name: str = library().bpf_program__name(pointer).decode()
        self.descriptor = int(library().bpf_program__fd(pointer))

    def test_run(self, packet: bytes, *, repeat: int = 1) -> Trial:
        """Runs the program on a packet without a device (BPF_PROG_TEST_RUN)."""
        return run_program(self.descriptor, self.name, packet, repeat=repeat)

    def statistics(self) -> ProgramStatistics:
        """Counts over all processors since the program was loaded."""
        lines = Path(f"/proc/self/fdinfo/{self.descriptor}").read_text(encoding="utf-8").splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return ProgramStatistics(run_time_ns=int(found["run_time_ns"]), runs=int(found["run_cnt"]))

    def send(self, packet: bytes, count: int) -> None:
        """Runs the program on copies of a packet that then really go where the program says (Linux 5.18)."""
        send_frames(self.descriptor, self.name, packet, count)


class BpfObject(Closing):
    """A loaded object file. Its programs, maps and arenas live as long as this object and their attachments."""

    def __init__(
        self,
        image: bytes,
        *,
        max_entries: Mapping[str, int] | None = None,
        value_bytes: Mapping[str, int] | None = None,
        read_only: Mapping[str, Any] | None = None,
        arenas: Mapping[str, int] | None = None,
        arena_addresses: Mapping[str, int] | None = None,
        xdp_fragments: bool = False,
    ) -> None:
        """`max_entries`: map -> number of entries, overriding the source. `value_bytes`: map -> bytes of a value,
        also overriding the source. `read_only`: global variable in .rodata -> its value, which the verifier treats as a
        constant. `arenas`: arena -> its size in bytes. `arena_addresses`:
        arena -> where another process will map it; this one does not. `xdp_fragments`: the object's XDP programs take
        packets in several pieces, as of interfaces with a large MTU.
        """
        loaded = library()
        clear_log()
        self._maps: dict[str, BpfMap] = {}
        self._arenas: dict[str, Arena] = {}
        self._pointer: int | None = loaded.bpf_object__open_mem(image, len(image), None)
        if self._pointer is None:
            raise refusal(ctypes.get_errno(), "BPF object: cannot be opened")
        try:
            try:
                self._elf = Elf(image)
                self.btf = Btf(self._elf)
            except (ElfError, BtfError) as error:
                raise BpfError(errno.EINVAL, f"BPF object: {error}") from None
            for name, entries in (max_entries or {}).items():
                result = loaded.bpf_map__set_max_entries(self._find_map(name), entries)
                if result != 0:
                    raise refusal(-result, f"BPF object: map {name} with {entries} entries")
            for name, size in (value_bytes or {}).items():
                result = loaded.bpf_map__set_value_size(self._find_map(name), size)
                if result != 0:
                    raise refusal(-result, f"BPF object: map {name} with values of {size} bytes")
            for name, value in (read_only or {}).items():
                self._set_variable(name, value)
            for _, program in self._each_program() if xdp_fragments else ():
                library().bpf_program__set_flags(program, _XDP_HAS_FRAGMENTS)
            for name, size in (arenas or {}).items():
                if name in (arena_addresses or {}):
                    self._place_arena(name, size, (arena_addresses or {})[name])
                else:
                    self._arenas[name] = self._placed_arena(name, size)
            result = loaded.bpf_object__load(self._pointer)
            if result != 0:
                names = ", ".join(name for name, _ in self._each_program())
                raise refusal(-result, f"BPF object with the programs {names}: the kernel refused it")
            for name, arena in self._arenas.items():
                arena.map(self.map(name).descriptor)
        except BaseException:
            self.close()
            raise

    def program(self, name: str) -> Program:
        found = library().bpf_object__find_program_by_name(self._open(), name.encode())
        if not found:
            raise BpfError(errno.ENOENT, f"the BPF object has no program {name!r}")
        return Program(found)

    def programs(self) -> list[str]:
        return [name for name, _ in self._each_program()]

    def map(self, name: str) -> BpfMap:
        if name not in self._maps:
            try:
                dtype = self.btf.map_value_dtype(name)
            except BtfError:
                dtype = None
            self._maps[name] = BpfMap.of_object(self._find_map(name), dtype)
        return self._maps[name]

    def maps(self) -> list[str]:
        names, found = [], library().bpf_object__next_map(self._open(), None)
        while found:
            names.append(library().bpf_map__name(found).decode())
            found = library().bpf_object__next_map(self._open(), found)
        return names

    def write_variable(self, name: str, content: bytes) -> None:
        """Writes a global variable of a loaded object. Its programs see it at once."""
        symbol = self._elf.symbols.get(name)
        if symbol is None or symbol.section not in (".bss", ".data") or len(content) != symbol.size_bytes:
            allowed = f"{symbol.size_bytes} in {symbol.section}" if symbol else "those of its variables"
            raise BpfError(errno.EINVAL, f"variable {name}: {len(content)} bytes; allowed: {allowed}")
        section = self.map(symbol.section)
        whole = section.read(0)
        end = symbol.offset + len(content)
        section.write(0, whole[: symbol.offset] + content + whole[end:])

    def arena(self, name: str) -> Arena:
        if name not in self._arenas:
            raise BpfError(errno.ENOENT, f"no arena {name!r} was asked for when the BPF object was loaded")
        return self._arenas[name]

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        pointer, self._pointer = self._pointer, None
        if pointer is not None:
            library().bpf_object__close(pointer)

    def _open(self) -> int:
        if self._pointer is None:
            raise BpfError(errno.EBADF, "the BPF object is closed")
        return self._pointer

    def _each_program(self) -> Iterator[tuple[str, int]]:
        found = library().bpf_object__next_program(self._open(), None)
        while found:
            yield library().bpf_program__name(found).decode(), found
            found = library().bpf_object__next_program(self._open(), found)

    def _find_map(self, name: str) -> Any:
        found = library().bpf_object__find_map_by_name(self._open(), name.encode())
        if not found:
            raise BpfError(errno.ENOENT, f"the BPF object has no map {name!r}")
        return found

    def _set_variable(self, name: str, value: Any) -> None:
        symbol = self._elf.symbols.get(name)
        if symbol is None or not symbol.section.startswith(".rodata"):
            raise BpfError(errno.ENOENT, f"the BPF object has no read-only variable {name!r}")
        raw = np.asarray(value, dtype=self.btf.variable_dtype(name).base).tobytes()
        if len(raw) != symbol.size_bytes:
            raise BpfError(errno.EINVAL, f"variable {name}: {len(raw)} bytes; allowed: {symbol.size_bytes}")
        size = ctypes.c_size_t()
        section = library().bpf_map__initial_value(self._find_map(symbol.section), ctypes.byref(size))
        if not section or symbol.offset + len(raw) > size.value:
            raise BpfError(errno.EINVAL, f"variable {name} is not inside {symbol.section} of {size.value} bytes")
        ctypes.memmove(section + symbol.offset, raw, len(raw))

    def _placed_arena(self, name: str, size_bytes: int) -> Arena:
        """Sets size and address of an arena of this process before the kernel creates it."""
        arena = Arena(name, size_bytes)
        try:
            self._place_arena(name, size_bytes, arena.address)
        except BaseException:
            arena.close()
            raise
        return arena

    def _place_arena(self, name: str, size_bytes: int, address: int) -> None:
        found = self._find_map(name)
        kind = library().bpf_map__type(found)
        if kind != BPF_MAP_TYPE_ARENA:
            raise BpfError(errno.EINVAL, f"map {name} is no arena: its type is {kind}")
        result = library().bpf_map__set_max_entries(found, pages(size_bytes))
        result = result or library().bpf_map__set_map_extra(found, address)
        if result != 0:
            raise refusal(-result, f"arena {name} of {size_bytes} bytes at {address:#x}")
