# SPDX-License-Identifier: Apache-2.0
"""`sennit opi` as OPI's clients see it: generated stubs, and the classes and the command of pydpu, OPI's own client.

The kernel's target is a folder (kernel_target.py). tests/rdma/test_opi.py has the kernel's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pydpu.cli
import pytest
from click.testing import CliRunner
from pydpu.proto.v1 import backend_aio_pb2 as aio
from pydpu.proto.v1 import backend_aio_pb2_grpc as aio_grpc
from pydpu.proto.v1 import frontend_nvme_pb2 as nvme
from pydpu.proto.v1 import frontend_nvme_pb2_grpc as nvme_grpc
from pydpu.proto.v1 import inventory_pb2, inventory_pb2_grpc
from pydpu.proto.v1 import opicommon_pb2 as common
from pydpu.storage import NvmeController, NvmeNamespace, NvmeSubsystem

from sennit.errors import DeviceError
from sennit.offload.opi import inventory
from sennit.offload.opi.server import Server
from sennit.offload.opi.storage import Storage
from tests.offload.kernel_target import NoLoops, count, left_in, made_in

NQN = "nqn.2026-01.org.example:disk"
DEADLINE_S = 30.0
Code = grpc.StatusCode


class Lender:
    """A server on loopback, with a folder of volumes in which `disk` is a file of 16 blocks."""

    def __init__(self, folder: Path) -> None:
        self.volumes, self.sys = folder / "volumes", folder / "sys"
        self.volumes.mkdir()
        self.disk = self.volumes / "disk"
        self.disk.write_bytes(bytes(16 * 512))
        self.root, self.loops = made_in(folder / "nvmet"), NoLoops()
        count(self.sys, *[0] * 17)
        self.why_not: str | None = None
        storage = Storage(self.volumes, root=self.root, sys=self.sys, loops=self.loops, why_not=lambda: self.why_not)
        self.server = Server("127.0.0.1:0", storage)
        self.address = f"127.0.0.1:{self.server.port}"
        self.channel = grpc.insecure_channel(self.address)
        self.aio = aio_grpc.AioVolumeServiceStub(self.channel)
        self.nvme = nvme_grpc.FrontendNvmeServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.close()

    def volume(self, chosen: str = "disk", **fields: Any) -> Any:
        fields = {"filename": str(self.disk)} | fields
        return self.aio.CreateAioVolume(
            aio.CreateAioVolumeRequest(aio_volume_id=chosen, aio_volume=aio.AioVolume(**fields)), timeout=DEADLINE_S
        )

    def subsystem(self, chosen: str = "shelf", **fields: Any) -> Any:
        spec = nvme.NvmeSubsystemSpec(**({"nqn": NQN} | fields))
        request = nvme.CreateNvmeSubsystemRequest(
            nvme_subsystem_id=chosen, nvme_subsystem=nvme.NvmeSubsystem(spec=spec)
        )
        return self.nvme.CreateNvmeSubsystem(request, timeout=DEADLINE_S)

    def controller(self, chosen: str = "tcp", parent: str = "nvmeSubsystems/shelf", **fields: Any) -> Any:
        endpoint = {"traddr": "127.0.0.1", "trsvcid": "4420", "adrfam": common.NVME_ADDRESS_FAMILY_IPV4} | {
            name: fields.pop(name) for name in ("traddr", "trsvcid", "adrfam") if name in fields
        }
        spec = nvme.NvmeControllerSpec(
            trtype=common.NVME_TRANSPORT_TYPE_TCP, fabrics_id=common.FabricsEndpoint(**endpoint)
        )
        spec.MergeFrom(nvme.NvmeControllerSpec(**fields))
        request = nvme.CreateNvmeControllerRequest(
            parent=parent, nvme_controller_id=chosen, nvme_controller=nvme.NvmeController(spec=spec)
        )
        return self.nvme.CreateNvmeController(request, timeout=DEADLINE_S)

    def namespace(self, chosen: str = "one", parent: str = "nvmeSubsystems/shelf", **fields: Any) -> Any:
        spec = nvme.NvmeNamespaceSpec(**({"volume_name_ref": "aioVolumes/disk"} | fields))
        request = nvme.CreateNvmeNamespaceRequest(
            parent=parent, nvme_namespace_id=chosen, nvme_namespace=nvme.NvmeNamespace(spec=spec)
        )
        return self.nvme.CreateNvmeNamespace(request, timeout=DEADLINE_S)

    def delete(self, name: str, *, allow_missing: bool = False) -> None:
        service, kind = {
            "aioVolumes": (self.aio, "AioVolume"),
            "nvmeSubsystems": (self.nvme, "NvmeSubsystem"),
            "nvmeControllers": (self.nvme, "NvmeController"),
            "nvmeNamespaces": (self.nvme, "NvmeNamespace"),
        }[name.split("/")[-2]]
        request = getattr(aio if kind == "AioVolume" else nvme, f"Delete{kind}Request")
        getattr(service, f"Delete{kind}")(request(name=name, allow_missing=allow_missing), timeout=DEADLINE_S)


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    made = Lender(tmp_path)
    yield made
    made.close()
    assert left_in(made.root) == []
    assert made.loops.attached == []


def refused(code: Any, text: str, call: Callable[..., Any], *arguments: Any, **fields: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **fields)
    error: Any = caught.value
    assert error.code() == code, error.details()
    assert text in error.details()


def test_a_volume_is_lent_and_taken_back(lender: Lender) -> None:
    volume = lender.volume()
    assert (volume.name, volume.block_size, volume.blocks_count) == ("aioVolumes/disk", 512, 16)
    subsystem = lender.subsystem(serial_number="SN 1", model_number="a model", max_namespaces=4)
    assert subsystem.status.firmware_revision == "6.1.0"
    controller = lender.controller()
    identifier = "1b4e28ba-2fa1-11d2-883f-b9a761bde3fb"
    namespace = lender.namespace(uuid=identifier, nguid=identifier, eui64=5)
    assert namespace.spec.host_nsid == 1
    assert namespace.spec.eui64 == 0, "the kernel shows none"
    assert namespace.status.state == nvme.NvmeNamespaceStatus.STATE_ENABLED
    shelf, port = lender.root / "subsystems" / NQN, lender.root / "ports" / "1"
    settings = {file.name: file.read_text() for file in [*shelf.glob("attr_*"), *port.glob("addr_*")]}
    assert settings == {
        "attr_allow_any_host": "1", "attr_serial": "SN 1", "attr_model": "a model", "attr_firmware": "6.1.0\n",
        "addr_trtype": "tcp", "addr_adrfam": "ipv4", "addr_traddr": "127.0.0.1", "addr_trsvcid": "4420",
    }  # fmt: skip
    assert {file.name: file.read_text() for file in (shelf / "namespaces" / "1").iterdir()} == {
        "device_path": os.devnull, "device_uuid": identifier, "device_nguid": identifier, "enable": "1",
    }  # fmt: skip
    assert os.readlink(port / "subsystems" / NQN) == str(shelf)
    for needed, by in ((volume, namespace), (subsystem, controller)):
        refused(Code.FAILED_PRECONDITION, f"delete {by.name} first", lender.delete, needed.name)
    for made in (controller, namespace, subsystem, volume):
        lender.delete(made.name)
    assert left_in(lender.root) == []
    assert lender.loops.attached == []


def test_what_the_kernel_counted_of_a_disk_is_told_at_each_of_its_names(lender: Lender) -> None:
    lender.volume()
    lender.subsystem()
    lender.controller()
    lender.namespace()
    count(lender.sys, 3, 0, 24, 5, 7, 0, 56, 9, 0, 0, 0, 2, 0, 16, 1, 0, 0)
    expected = common.VolumeStats(
        read_ops_count=3, read_bytes_count=24 * 512, read_latency_ticks=5, write_ops_count=7,
        write_bytes_count=56 * 512, write_latency_ticks=9, unmap_ops_count=2, unmap_bytes_count=16 * 512,
        unmap_latency_ticks=1,
    )  # fmt: skip
    shelf = "nvmeSubsystems/shelf"
    assert lender.aio.StatsAioVolume(aio.StatsAioVolumeRequest(name="aioVolumes/disk")).stats == expected
    assert lender.nvme.StatsNvmeSubsystem(nvme.StatsNvmeSubsystemRequest(name=shelf)).stats == expected
    for kind, name in (("Controller", "nvmeControllers/tcp"), ("Namespace", "nvmeNamespaces/one")):
        request = getattr(nvme, f"StatsNvme{kind}Request")(name=f"{shelf}/{name}")
        assert getattr(lender.nvme, f"StatsNvme{kind}")(request).stats == expected
    count(lender.sys, 2**40, 0, 2**40, 0, 1, 0, 0, 0, 0, 0, 0)  # an older kernel counts no discards
    stats = lender.aio.StatsAioVolume(aio.StatsAioVolumeRequest(name="aioVolumes/disk")).stats
    assert (stats.read_ops_count, stats.read_bytes_count, stats.write_ops_count) == (2**31 - 1, 2**31 - 1, 1)


def test_the_same_request_again_gets_what_is_there_and_another_is_refused(lender: Lender) -> None:
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (lender.volume, {"block_size": 1024}),
        (lender.subsystem, {"serial_number": "2"}),
        (lender.controller, {"trsvcid": "4421"}),
        (lender.namespace, {"host_nsid": 2}),
    ]
    for create, other in calls:
        first = create()
        assert create() == first
        refused(Code.ALREADY_EXISTS, f"{first.name} is there", create, **other)
    refused(Code.ALREADY_EXISTS, "has this address", lender.controller, "again")
    refused(Code.FAILED_PRECONDITION, "another volume's", lender.volume, "again")
    refused(Code.ALREADY_EXISTS, NQN, lender.subsystem, "again")
    refused(Code.FAILED_PRECONDITION, "in use", lender.namespace, "again", host_nsid=2)
    assert lender.loops.attached == [lender.disk]


def test_one_port_serves_two_subsystems_and_ends_with_the_last(lender: Lender) -> None:
    for name in ("a", "b"):
        lender.subsystem(name, nqn=f"{NQN}-{name}")
        lender.controller(parent=f"nvmeSubsystems/{name}")
    assert os.listdir(lender.root / "ports") == ["1"]
    lender.controller("other", parent="nvmeSubsystems/a", trsvcid="4421")
    lender.delete("nvmeSubsystems/a/nvmeControllers/tcp")
    assert sorted(os.listdir(lender.root / "ports")) == ["1", "2"]
    lender.delete("nvmeSubsystems/b/nvmeControllers/tcp")
    assert os.listdir(lender.root / "ports") == ["2"]


def test_one_host_alone_may_have_a_subsystem(lender: Lender) -> None:
    host = "nqn.2014-08.org.nvmexpress:uuid:1b4e28ba-2fa1-11d2-883f-b9a761bde3fb"
    for name in ("a", "b"):
        lender.subsystem(name, nqn=f"{NQN}-{name}", hostnqn=host)
    folder = lender.root / "subsystems" / f"{NQN}-a"
    assert (folder / "attr_allow_any_host").read_text() == "0"
    assert os.listdir(folder / "allowed_hosts") == [host]
    lender.delete("nvmeSubsystems/a")
    assert os.listdir(lender.root / "hosts") == [host]


def test_namespaces_get_free_numbers_up_to_the_most(lender: Lender) -> None:
    lender.subsystem(max_namespaces=2)
    for number, name in enumerate("abc", 1):
        file = lender.volumes / name
        file.write_bytes(bytes(512))
        lender.volume(name, filename=str(file))
        if number < 3:
            assert lender.namespace(name, volume_name_ref=f"aioVolumes/{name}").spec.host_nsid == number

    def third(nsid: int) -> Any:
        return lender.namespace("c", volume_name_ref="aioVolumes/c", host_nsid=nsid)

    refused(Code.RESOURCE_EXHAUSTED, "2 namespaces", third, 0)
    refused(Code.ALREADY_EXISTS, "host_nsid 1", third, 1)
    refused(Code.INVALID_ARGUMENT, "must be 1 to 2", third, 3)
    lender.delete("nvmeSubsystems/shelf/nvmeNamespaces/a")
    assert third(0).spec.host_nsid == 1


def test_lists_come_in_pages(lender: Lender) -> None:
    for name in ("c", "a", "b"):
        lender.subsystem(name, nqn=f"{NQN}-{name}")
    found, token = [], ""
    for _ in range(2):
        answer = lender.nvme.ListNvmeSubsystems(nvme.ListNvmeSubsystemsRequest(page_size=2, page_token=token))
        found.append([each.name for each in answer.nvme_subsystems])
        token = answer.next_page_token
    assert found == [["nvmeSubsystems/a", "nvmeSubsystems/b"], ["nvmeSubsystems/c"]]
    assert token == ""
    for wrong in ({"page_size": -1}, {"page_token": "2"}):
        request = nvme.ListNvmeSubsystemsRequest(**wrong)
        refused(Code.INVALID_ARGUMENT, next(iter(wrong)), lender.nvme.ListNvmeSubsystems, request)
    none = nvme.ListNvmeNamespacesRequest(parent="nvmeSubsystems/a")
    assert not lender.nvme.ListNvmeNamespaces(none).nvme_namespaces
    missing = nvme.ListNvmeNamespacesRequest(parent="nvmeSubsystems/z")
    refused(Code.NOT_FOUND, "nvmeSubsystems/z", lender.nvme.ListNvmeNamespaces, missing)


@pytest.mark.parametrize("name", ["aioVolumes/z", "nvmeSubsystems/z", "nvmeSubsystems/z/nvmeNamespaces/z"])
def test_what_is_missing_is_deleted_only_if_it_may_be_missing(lender: Lender, name: str) -> None:
    refused(Code.NOT_FOUND, name, lender.delete, name)
    lender.delete(name, allow_missing=True)
    for wrong in (f"{name}/../z", f"/{name}", f"{name}/"):
        request = aio.DeleteAioVolumeRequest(name=wrong, allow_missing=True)
        refused(Code.INVALID_ARGUMENT, "aioVolumes/ID", lender.aio.DeleteAioVolume, request)


@pytest.mark.parametrize("chosen", ["A", "a/b", "..", "1a", "a-", "a" * 64, "a\n", "é"])
def test_ids_are_those_of_the_aips(lender: Lender, chosen: str) -> None:
    for create in (lender.volume, lender.subsystem):
        refused(Code.INVALID_ARGUMENT, "1 to 63", create, chosen)


def test_without_an_id_the_server_takes_one(lender: Lender) -> None:
    names = {lender.subsystem("", nqn=f"{NQN}-{number}").name for number in range(2)}
    assert len(names) == 2
    assert all(name.startswith("nvmeSubsystems/") for name in names)


WRONG_FILES = {
    "outside": ("/etc/passwd", "must be a path below"),
    "dots": ("{0}/../sys", "without .."),
    "relative": ("disk", "must be a path below"),
    "the folder": ("{0}", "must be a path below"),
    "a folder": ("{0}/inner", "Is a directory"),
    "missing": ("{0}/missing", "No such file"),
    "below a file": ("{0}/disk/x", "Not a directory"),
    "a pipe": ("{0}/pipe", "a file or a block device"),
    "empty": ("{0}/empty", "has 0 bytes"),
    "odd": ("{0}/odd", "must be blocks of 512"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_file_that_can_be_no_volume_is_refused(lender: Lender, case: str) -> None:
    name, text = WRONG_FILES[case]
    (lender.volumes / "inner").mkdir()
    os.mkfifo(lender.volumes / "pipe")
    (lender.volumes / "empty").touch()
    (lender.volumes / "odd").write_bytes(bytes(700))
    with pytest.raises(grpc.RpcError) as caught:
        lender.volume(filename=name.format(lender.volumes))
    error: Any = caught.value
    assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION)
    assert text in error.details()
    assert lender.loops.attached == []


def test_wrong_fields_are_refused_with_what_is_allowed(lender: Lender) -> None:
    lender.volume()
    lender.subsystem()
    invalid: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (lender.volume, {"block_size": 100}, "block_size 100, must be 512"),
        (lender.volume, {"block_size": -512}, "block_size -512"),
        (lender.volume, {"blocks_count": 17}, "has 16 blocks"),
        (lender.subsystem, {"nqn": "nqn.2026-01.org.example:a/b"}, "no /"),
        (lender.subsystem, {"nqn": ".."}, "must be as nqn."),
        (lender.subsystem, {"nqn": NQN + "x" * 223}, "at most 223"),
        (lender.subsystem, {"hostnqn": "host"}, "hostnqn 'host'"),
        (lender.subsystem, {"serial_number": "1" * 21}, "at most 20"),
        (lender.subsystem, {"model_number": "ö"}, "ASCII"),
        (lender.subsystem, {"max_namespaces": 1025}, "0 to 1024"),
        (lender.controller, {"traddr": "localhost"}, "must be an IP address"),
        (lender.controller, {"traddr": "::1"}, "NVME_ADDRESS_FAMILY_IPV6"),
        (lender.controller, {"trsvcid": "0"}, "1 to 65535"),
        (lender.controller, {"parent": "shelf"}, "nvmeSubsystems/ID"),
        (lender.namespace, {"uuid": "1b4e"}, "32 hexadecimal digits"),
        (lender.namespace, {"host_nsid": -1}, "host_nsid -1"),
        (lender.namespace, {"volume_name_ref": "Malloc1"}, "aioVolumes/ID"),
    ]
    for create, fields, text in invalid:
        refused(Code.INVALID_ARGUMENT, text, create, "other", **fields)
    unserved: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (lender.volume, {"uuid": "1b4e28ba-2fa1-11d2-883f-b9a761bde3fb"}, "aio_volume.uuid"),
        (lender.subsystem, {"psk": b"key"}, "nvme_subsystem.spec.psk"),
        (lender.controller, {"max_limit": common.QosLimit(rd_iops_kiops=1)}, "nvme_controller.spec.max_limit"),
        (lender.controller, {"trtype": common.NVME_TRANSPORT_TYPE_RDMA}, "NVME_TRANSPORT_TYPE_RDMA"),
        (lender.controller, {"trtype": 17}, "trtype 17"),
        (lender.namespace, {"eui64": 1}, "eui64"),
    ]
    for create, fields, text in unserved:
        refused(Code.UNIMPLEMENTED, text, create, "other", **fields)
    refused(Code.NOT_FOUND, "aioVolumes/z", lender.namespace, volume_name_ref="aioVolumes/z")
    refused(Code.NOT_FOUND, "nvmeSubsystems/z", lender.namespace, parent="nvmeSubsystems/z")


def test_what_the_kernel_refuses_leaves_nothing_behind(lender: Lender) -> None:
    lender.subsystem()
    refused(Code.FAILED_PRECONDITION, "assign requested address", lender.controller, traddr="203.0.113.1")
    assert os.listdir(lender.root / "ports") == []
    (lender.root / "subsystems" / f"{NQN}-theirs").mkdir()
    refused(Code.ALREADY_EXISTS, "theirs", lender.subsystem, "other", nqn=f"{NQN}-theirs")
    (lender.root / "subsystems" / f"{NQN}-theirs").rmdir()
    lender.why_not = "this kernel has no NVMe target (nvmet)"
    refused(Code.FAILED_PRECONDITION, "no NVMe target", lender.volume)
    refused(Code.FAILED_PRECONDITION, "no NVMe target", lender.subsystem, "other", nqn=f"{NQN}-other")


def test_methods_that_are_not_served_say_so(lender: Lender) -> None:
    request = nvme.UpdateNvmeSubsystemRequest()
    refused(Code.UNIMPLEMENTED, "UpdateNvmeSubsystem is not served", lender.nvme.UpdateNvmeSubsystem, request)


def test_a_message_that_is_none_is_refused(lender: Lender, rng: Any) -> None:
    call = lender.channel.unary_unary("/opi_api.storage.v1.AioVolumeService/CreateAioVolume")
    for size in (1, 7, 300):
        with pytest.raises(grpc.RpcError):
            call(b"\xff" + rng.bytes(size), timeout=DEADLINE_S)
    assert lender.volume().name == "aioVolumes/disk", "it serves on"


def test_what_is_lent_ends_with_the_server(tmp_path: Path) -> None:
    lender = Lender(tmp_path)
    lender.volume()
    lender.subsystem(hostnqn=f"{NQN}-host")
    lender.controller()
    lender.namespace()
    lender.close()
    assert left_in(lender.root) == []
    assert lender.loops.attached == []


def test_a_port_in_use_is_an_error(lender: Lender) -> None:
    with pytest.raises(DeviceError, match=f"cannot listen at {lender.address}: Address already in use"):
        Server(lender.address, Storage(lender.volumes))
    for address, why in (
        ("203.0.113.1:0", "Cannot assign requested address"),
        ("a host:0", "Name or service not known"),
        (f"{'ä' * 64}:0", "no name of a host"),
    ):
        with pytest.raises(DeviceError, match=f"cannot listen at {address}: {why}"):
            Server(address, Storage(lender.volumes))


@pytest.mark.parametrize("host", ["", "localhost"])
def test_it_listens_at_all_addresses_or_at_a_name(tmp_path: Path, host: str) -> None:
    with Server(f"{host}:0", Storage(tmp_path)) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = inventory_pb2_grpc.InventoryServiceStub(channel)
        assert stub.GetInventory(inventory_pb2.GetInventoryRequest(), timeout=DEADLINE_S).processor.total_threads


def test_the_classes_of_pydpu_work(lender: Lender) -> None:
    lender.volume()
    shelf = NvmeSubsystem(nqn=NQN)
    made = shelf.create(lender.address)
    assert made.name == shelf.name
    assert shelf.get(lender.address) == made
    assert list(shelf.list(lender.address).nvme_subsystems) == [made]
    disk = NvmeNamespace(shelf, "aioVolumes/disk")
    lent = disk.create(lender.address)
    assert disk.get(lender.address) == lent
    assert list(disk.list(lender.address).nvme_namespaces) == [lent]
    count(lender.sys, 5, *[0] * 16)
    assert disk.stats(lender.address).stats.read_ops_count == 5
    assert shelf.stats(lender.address).stats.read_ops_count == 5
    pci = NvmeController(shelf, queue=64, pf=0, vf=0)  # pydpu has PCIe alone
    refused(Code.UNIMPLEMENTED, "NVME_TRANSPORT_TYPE_PCIE", pci.create, lender.address)
    for each in (disk, shelf):
        each.delete(lender.address)


@pytest.mark.parametrize("command", [["inventory", "get"], ["storage", "subsystem"], ["storage", "show"]])
def test_the_command_of_pydpu_works(lender: Lender, command: list[str]) -> None:
    done = CliRunner().invoke(pydpu.cli.main, ["--address", lender.address, *command])
    assert done.exit_code == 0, done.output
    assert "StatusCode" not in done.output, done.output


def test_an_inventory_is_what_the_kernel_tells(tmp_path: Path) -> None:
    files = {
        "class/dmi/id/sys_vendor": "A maker\n", "class/dmi/id/product_name": "A machine\n",
        "class/dmi/id/bios_date": "01/02/2026\n", "class/dmi/id/chassis_type": "23\n",
        "devices/system/memory/block_size_bytes": "8000000\n", "devices/system/memory/memory0/state": "online\n",
        "devices/system/memory/memory1/state": "offline\n",
        "bus/pci/devices/0000:00:05.0/class": "0x020000\n", "bus/pci/devices/0000:00:05.0/vendor": "0x15b3\n",
        "bus/pci/devices/0000:00:05.0/device": "0xa2dc\n", "bus/pci/devices/0000:00:05.0/revision": "0x01\n",
    }  # fmt: skip
    for thread, core in enumerate((0, 0, 1, 1)):
        files |= {f"devices/system/cpu/cpu{thread}/topology/core_id": f"{core}\n"}
        files |= {f"devices/system/cpu/cpu{thread}/topology/physical_package_id": "0\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = inventory.read(tmp_path)
    assert (found.system.vendor, found.system.name, found.system.serial_number) == ("A maker", "A machine", "")
    assert (found.bios.date, found.chassis.type) == ("01/02/2026", "23")
    assert (found.processor.total_cores, found.processor.total_threads) == (2, 4)
    assert found.memory.total_physical_bytes == 0x8000000
    (device,) = found.pci
    assert (device.address, device.vendor, device.product) == ("0000:00:05.0", "15b3", "a2dc")
    assert (getattr(device, "class"), device.subclass, device.driver) == ("02", "00", "")


def test_the_command_serves_until_it_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sennit", "opi", "--listen", "127.0.0.1:0", "--volumes", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            ready = process.stderr.readline()
            address = ready.partition("ready at ")[2].partition(",")[0]
            with grpc.insecure_channel(address) as channel:
                stub = inventory_pb2_grpc.InventoryServiceStub(channel)
                found = stub.GetInventory(inventory_pb2.GetInventoryRequest(), timeout=DEADLINE_S)
                assert found.processor.total_threads >= 1
                taken = subprocess.run(
                    [*command[:5], address], capture_output=True, text=True, timeout=DEADLINE_S, check=False
                )
                assert (taken.returncode, f"cannot listen at {address}" in taken.stderr) == (1, True), taken.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
