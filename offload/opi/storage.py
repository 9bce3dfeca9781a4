# SPDX-License-Identifier: Apache-2.0
"""OPI's AioVolumeService and FrontendNvmeService over the kernel's NVMe/TCP target.

A method has the name that OPI gives it, takes its request and returns its response; both are protocol buffers. It
raises Refused, and OSError where the kernel refuses. No two of them may run at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

import grpc
from google.protobuf import empty_pb2
from pydpu.proto.v1 import backend_aio_pb2 as aio
from pydpu.proto.v1 import frontend_nvme_pb2 as nvme
from pydpu.proto.v1 import opicommon_pb2 as common

from sennit.offload.opi import nvme_target
from sennit.offload.opi.inventory import SYS
from sennit.offload.opi.nvme_target import Namespace, Port, Subsystem
from sennit.offload.opi.resources import Collection, Message, Refused, invalid, only
from sennit.offload.opi.volumes import Loops, Volume, counted, open_volume

# NVM Express Base Specification 2.0, 4.7. A "/" would end the name of a folder.
NQN: Final = re.compile(r"nqn\.\d{4}-\d{2}(\.[A-Za-z0-9-]+)+:[!-.0-~]+")
NQN_MAX: Final = 223
# Identify Controller: SN and MN, ASCII.
SERIAL_MAX, MODEL_MAX = 20, 40
# drivers/nvme/target/nvmet.h, NVMET_MAX_NAMESPACES
NAMESPACES_MAX: Final = 1024
FAMILIES: Final = {4: common.NVME_ADDRESS_FAMILY_IPV4, 6: common.NVME_ADDRESS_FAMILY_IPV6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Listener:
    port: Port
    subsystem: Subsystem


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Disk:
    space: Namespace
    number: int
    volume: str


class Storage:
    """Volumes below `folder`, and the subsystems, controllers and namespaces that lend them.

    `close` removes what was made. `why_not` says why nothing can be made on this machine.
    """

    def __init__(
        self,
        folder: Path,
        *,
        root: Path = nvme_target.ROOT,
        sys: Path = SYS,
        loops: Loops | None = None,
        why_not: Callable[[], str | None] = nvme_target.why_not,
    ) -> None:
        self._folder, self._root, self._sys, self._loops, self._why_not = folder, root, sys, loops or Loops(), why_not
        self._volumes: Collection[Volume] = Collection("aioVolumes/{}")
        self._subsystems: Collection[Subsystem] = Collection("nvmeSubsystems/{}")
        self._controllers: Collection[_Listener] = Collection("nvmeSubsystems/{}/nvmeControllers/{}")
        self._namespaces: Collection[_Disk] = Collection("nvmeSubsystems/{}/nvmeNamespaces/{}")
        self._made_hosts: set[str] = set()

    def close(self) -> None:
        """What a kernel does not give back stays, and does not keep the rest."""
        for listener in self._controllers:
            with contextlib.suppress(OSError):
                self._hang_up(listener.shown.name, listener.behind)
        for disk in self._namespaces:
            with contextlib.suppress(OSError):
                disk.behind.space.end()
        for subsystem in self._subsystems:
            with contextlib.suppress(OSError):
                subsystem.behind.end()
        for volume in self._volumes:
            with contextlib.suppress(OSError):
                volume.behind.detach()

    def CreateAioVolume(self, request: Message) -> Message:
        asked = request.aio_volume
        only(asked, {"name", "block_size", "blocks_count", "filename"}, "aio_volume")

        def make(name: str) -> tuple[Message, Volume]:
            self._check_machine()
            taken = [entry.behind.identity for entry in self._volumes]
            made = open_volume(
                asked.filename,
                asked.block_size,
                asked.blocks_count,
                folder=self._folder,
                taken=taken,
                loops=self._loops,
            )
            shown = aio.AioVolume(filename=asked.filename, block_size=made.block_bytes, blocks_count=made.blocks)
            return shown, made

        return self._volumes.create("", request.aio_volume_id, asked, make)

    def GetAioVolume(self, request: Message) -> Message:
        return self._volumes.get(request.name).shown

    def ListAioVolumes(self, request: Message) -> Message:
        found, token = self._volumes.page(request.page_size, request.page_token)
        return aio.ListAioVolumesResponse(aio_volumes=found, next_page_token=token)

    def StatsAioVolume(self, request: Message) -> Message:
        return aio.StatsAioVolumeResponse(stats=counted([self._volumes.get(request.name).behind], self._sys))

    def DeleteAioVolume(self, request: Message) -> Message:
        for disk in self._namespaces:
            if disk.behind.volume == request.name:
                raise _needed(request.name, disk.shown.name)
        self._volumes.delete(request.name, request.allow_missing, lambda volume: volume.detach())
        return empty_pb2.Empty()

    def CreateNvmeSubsystem(self, request: Message) -> Message:
        asked = request.nvme_subsystem.spec
        where = "nvme_subsystem.spec"
        only(asked, {"nqn", "serial_number", "model_number", "max_namespaces", "hostnqn"}, where)
        _check_nqn(f"{where}.nqn", asked.nqn)
        if asked.hostnqn:
            _check_nqn(f"{where}.hostnqn", asked.hostnqn)
        _check_text(f"{where}.serial_number", asked.serial_number, SERIAL_MAX)
        _check_text(f"{where}.model_number", asked.model_number, MODEL_MAX)
        if not 0 <= asked.max_namespaces <= NAMESPACES_MAX:
            raise invalid(f"{where}.max_namespaces {asked.max_namespaces}, must be 0 to {NAMESPACES_MAX}")

        def make(name: str) -> tuple[Message, Subsystem]:
            self._check_machine()
            made = Subsystem(
                asked.nqn, serial=asked.serial_number, model=asked.model_number, host=asked.hostnqn,
                made_hosts=self._made_hosts, root=self._root,
            )  # fmt: skip
            made.begin()
            status = nvme.NvmeSubsystemStatus(firmware_revision=made.firmware())
            return nvme.NvmeSubsystem(spec=asked, status=status), made

        return self._subsystems.create("", request.nvme_subsystem_id, request.nvme_subsystem, make)

    def GetNvmeSubsystem(self, request: Message) -> Message:
        return self._subsystems.get(request.name).shown

    def ListNvmeSubsystems(self, request: Message) -> Message:
        found, token = self._subsystems.page(request.page_size, request.page_token)
        return nvme.ListNvmeSubsystemsResponse(nvme_subsystems=found, next_page_token=token)

    def StatsNvmeSubsystem(self, request: Message) -> Message:
        self._subsystems.get(request.name)
        return nvme.StatsNvmeSubsystemResponse(stats=self._counted_below(request.name))

    def DeleteNvmeSubsystem(self, request: Message) -> Message:
        children = self._controllers.page(1, "", request.name)[0] + self._namespaces.page(1, "", request.name)[0]
        if children:
            raise _needed(request.name, children[0].name)
        self._subsystems.delete(request.name, request.allow_missing, lambda subsystem: subsystem.end())
        return empty_pb2.Empty()

    def CreateNvmeController(self, request: Message) -> Message:
        asked = request.nvme_controller.spec
        where = "nvme_controller.spec"
        if asked.trtype != common.NVME_TRANSPORT_TYPE_TCP:
            transport = common.NvmeTransportType.Name(asked.trtype) if asked.trtype in range(6) else asked.trtype
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"{where}.trtype {transport} is not served; TCP is")
        only(asked, {"trtype", "fabrics_id"}, where)
        address, tcp_port = _endpoint(asked.fabrics_id, f"{where}.fabrics_id")
        subsystem = self._subsystems.get(request.parent).behind

        def make(name: str) -> tuple[Message, _Listener]:
            there = [entry for entry in self._controllers if _at(entry.behind.port, address, tcp_port)]
            for entry in there:
                if entry.behind.subsystem is subsystem:
                    raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"{entry.shown.name} has this address")
            port = there[0].behind.port if there else Port(address, tcp_port, root=self._root)
            if not there:
                port.begin()
            try:
                port.show(subsystem)
            except BaseException:
                if not there:
                    port.end()
                raise
            return nvme.NvmeController(spec=asked), _Listener(port=port, subsystem=subsystem)

        return self._controllers.create(request.parent, request.nvme_controller_id, request.nvme_controller, make)

    def GetNvmeController(self, request: Message) -> Message:
        return self._controllers.get(request.name).shown

    def ListNvmeControllers(self, request: Message) -> Message:
        self._subsystems.get(request.parent)
        found, token = self._controllers.page(request.page_size, request.page_token, request.parent)
        return nvme.ListNvmeControllersResponse(nvme_controllers=found, next_page_token=token)

    def StatsNvmeController(self, request: Message) -> Message:
        """Of the whole subsystem: the kernel counts by device, and each controller leads to all of them."""
        self._controllers.get(request.name)
        return nvme.StatsNvmeControllerResponse(stats=self._counted_below(_parent(request.name)))

    def DeleteNvmeController(self, request: Message) -> Message:
        self._controllers.delete(
            request.name, request.allow_missing, lambda listener: self._hang_up(request.name, listener)
        )
        return empty_pb2.Empty()

    def CreateNvmeNamespace(self, request: Message) -> Message:
        asked = request.nvme_namespace.spec
        where = "nvme_namespace.spec"
        identifier, nguid = _uuid(f"{where}.uuid", asked.uuid), _uuid(f"{where}.nguid", asked.nguid)
        if asked.eui64 and not (identifier or nguid):
            raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"{where}.eui64 is not served; give uuid or nguid")
        parent = self._subsystems.get(request.parent)
        most = parent.shown.spec.max_namespaces or NAMESPACES_MAX
        if not 0 <= asked.host_nsid <= most:
            raise invalid(f"{where}.host_nsid {asked.host_nsid}, must be 1 to {most}, or 0 for a free one")

        def make(name: str) -> tuple[Message, _Disk]:
            volume = self._volumes.get(asked.volume_name_ref).behind
            for disk in self._namespaces:
                if disk.behind.volume == asked.volume_name_ref:
                    raise _needed(asked.volume_name_ref, disk.shown.name)
            taken = {entry.behind.number for entry in self._namespaces.below(request.parent)}
            if asked.host_nsid in taken:
                raise Refused(grpc.StatusCode.ALREADY_EXISTS, f"{request.parent} has a host_nsid {asked.host_nsid}")
            number = asked.host_nsid or next((free for free in range(1, most + 1) if free not in taken), 0)
            if not number:
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{request.parent} has {most} namespaces, its most")
            made = Namespace(parent.behind, number, volume.device, uuid=identifier, nguid=nguid)
            made.begin()
            shown = nvme.NvmeNamespace(spec=asked)
            shown.spec.host_nsid = number
            shown.spec.ClearField("eui64")  # the kernel shows none
            shown.status.state = nvme.NvmeNamespaceStatus.STATE_ENABLED
            shown.status.oper_state = nvme.NvmeNamespaceStatus.OPER_STATE_ONLINE
            return shown, _Disk(space=made, number=number, volume=asked.volume_name_ref)

        return self._namespaces.create(request.parent, request.nvme_namespace_id, request.nvme_namespace, make)

    def GetNvmeNamespace(self, request: Message) -> Message:
        return self._namespaces.get(request.name).shown

    def ListNvmeNamespaces(self, request: Message) -> Message:
        self._subsystems.get(request.parent)
        found, token = self._namespaces.page(request.page_size, request.page_token, request.parent)
        return nvme.ListNvmeNamespacesResponse(nvme_namespaces=found, next_page_token=token)

    def StatsNvmeNamespace(self, request: Message) -> Message:
        volume = self._volumes.get(self._namespaces.get(request.name).behind.volume).behind
        return nvme.StatsNvmeNamespaceResponse(stats=counted([volume], self._sys))

    def DeleteNvmeNamespace(self, request: Message) -> Message:
        self._namespaces.delete(request.name, request.allow_missing, lambda disk: disk.space.end())
        return empty_pb2.Empty()

    def _check_machine(self) -> None:
        if reason := self._why_not():
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, f"this machine lends no disks: {reason}")

    def _counted_below(self, subsystem: str) -> Message:
        names = [entry.behind.volume for entry in self._namespaces.below(subsystem)]
        return counted([self._volumes.get(name).behind for name in names], self._sys)

    def _hang_up(self, name: str, listener: _Listener) -> None:
        listener.port.hide(listener.subsystem)
        if not any(entry.behind.port is listener.port and entry.shown.name != name for entry in self._controllers):
            listener.port.end()


def _needed(name: str, by: str) -> Refused:
    return Refused(grpc.StatusCode.FAILED_PRECONDITION, f"{name} is in use: delete {by} first")


def _parent(name: str) -> str:
    return "/".join(name.split("/")[:2])


def _at(port: Port, address: str, tcp_port: int) -> bool:
    return (port.address, port.tcp_port) == (address, tcp_port)


def _check_nqn(field: str, value: str) -> None:
    if not NQN.fullmatch(value) or len(value) > NQN_MAX:
        raise invalid(f"{field} {value!r}, must be as nqn.2026-01.org.example:disk, at most {NQN_MAX} characters, no /")


def _check_text(field: str, value: str, most: int) -> None:
    if len(value) > most or not re.fullmatch("[ -~]*", value):
        raise invalid(f"{field} {value!r}, must be ASCII, at most {most} characters")


def _uuid(field: str, value: str) -> str:
    try:
        return str(uuid.UUID(value)) if value else ""
    except ValueError:
        raise invalid(f"{field} {value!r}, must be 32 hexadecimal digits") from None


def _endpoint(asked: Message, field: str) -> tuple[str, int]:
    """The address, as short as it can be written, and the port of TCP."""
    try:
        address = ipaddress.ip_address(asked.traddr)
    except ValueError:
        raise invalid(f"{field}.traddr {asked.traddr!r}, must be an IP address") from None
    if asked.adrfam != FAMILIES[address.version]:
        raise invalid(f"{field}.adrfam must be that of {asked.traddr}: NVME_ADDRESS_FAMILY_IPV{address.version}")
    if not re.fullmatch("[0-9]{1,5}", asked.trsvcid) or not 1 <= int(asked.trsvcid) <= 65_535:
        raise invalid(f"{field}.trsvcid {asked.trsvcid!r}, must be a port of TCP, 1 to 65535")
    return str(address), int(asked.trsvcid)
