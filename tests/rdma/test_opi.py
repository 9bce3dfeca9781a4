# SPDX-License-Identifier: Apache-2.0
"""A disk that OPI's interfaces lend: the VM's kernel has both ends of NVMe/TCP."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydpu.proto.v1 import backend_aio_pb2 as aio
from pydpu.proto.v1 import backend_aio_pb2_grpc as aio_grpc
from pydpu.proto.v1 import frontend_nvme_pb2 as nvme
from pydpu.proto.v1 import frontend_nvme_pb2_grpc as nvme_grpc
from pydpu.proto.v1 import opicommon_pb2 as common

from sennit.offload.opi.nvme_target import ROOT, TCP_PORT, Port, run
from sennit.offload.opi.server import Server
from sennit.offload.opi.storage import Storage
from sennit.testbed.topology.nvme import Connection, looped, make_disk, mounted

pytestmark = [pytest.mark.rdma, pytest.mark.needs("nvme-tcp")]

NQN = "nqn.2026-01.org.example:disk"
UUID = "1b4e28ba-2fa1-11d2-883f-b9a761bde3fb"
BYTES = 1 << 20
DEADLINE_S = 60.0


def made_of_nvmet() -> list[str]:
    return [name for group in ("hosts", "ports", "subsystems") for name in os.listdir(ROOT / group)]


def test_a_disk_is_lent_written_counted_and_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_bytes(bytes(BYTES))
    before = made_of_nvmet()
    with (
        Server("127.0.0.1:0", Storage(tmp_path)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
        contextlib.ExitStack() as stack,
    ):
        volumes, front = aio_grpc.AioVolumeServiceStub(channel), nvme_grpc.FrontendNvmeServiceStub(channel)

        def call(method: Any, request: Any) -> Any:
            return method(request, timeout=DEADLINE_S)

        volume = call(
            volumes.CreateAioVolume,
            aio.CreateAioVolumeRequest(aio_volume=aio.AioVolume(filename=str(file), block_size=4096)),
        )
        assert volume.blocks_count == BYTES // 4096
        spec: Any = nvme.NvmeSubsystemSpec(
            nqn=NQN, serial_number="SN1", model_number="OPI", hostnqn="nqn.2026-11.sennit:host0"
        )
        subsystem = call(
            front.CreateNvmeSubsystem,
            nvme.CreateNvmeSubsystemRequest(nvme_subsystem=nvme.NvmeSubsystem(spec=spec)),
        )
        spec = nvme.NvmeControllerSpec(
            trtype=common.NVME_TRANSPORT_TYPE_TCP,
            fabrics_id=common.FabricsEndpoint(
                traddr="127.0.0.1", trsvcid=str(TCP_PORT), adrfam=common.NVME_ADDRESS_FAMILY_IPV4
            ),
        )
        request: Any = nvme.CreateNvmeControllerRequest(
            parent=subsystem.name, nvme_controller=nvme.NvmeController(spec=spec)
        )
        controller = call(front.CreateNvmeController, request)
        request.nvme_controller.spec.fabrics_id.traddr = "203.0.113.1"
        with pytest.raises(grpc.RpcError, match="assign requested address") as refused:
            call(front.CreateNvmeController, request)
        error: Any = refused.value
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
        spec = nvme.NvmeNamespaceSpec(volume_name_ref=volume.name, uuid=UUID, nguid=UUID)
        namespace = call(
            front.CreateNvmeNamespace,
            nvme.CreateNvmeNamespaceRequest(parent=subsystem.name, nvme_namespace=nvme.NvmeNamespace(spec=spec)),
        )

        def stats() -> Any:
            return call(front.StatsNvmeNamespace, nvme.StatsNvmeNamespaceRequest(name=namespace.name)).stats

        port = Port("127.0.0.1")
        with pytest.raises(OSError, match=r"."):  # another host than the one that may
            Connection(port, NQN, "host1").begin()
        connection = Connection(port, NQN, "host0")
        stack.callback(connection.end)
        device = connection.begin()
        identity = Path("/sys/class/block") / device.name / "uuid"
        assert identity.read_text().strip() == UUID
        assert (Path("/sys/class/block") / device.name / "queue/logical_block_size").read_text() == "4096\n"
        counted = stats()
        content = os.urandom(16 * 4096)
        with device.open("r+b") as disk:
            disk.write(content)
            disk.flush()
            os.fsync(disk.fileno())
        run("blockdev", "--flushbufs", str(device))
        with device.open("rb") as again:
            assert again.read(len(content)) == content
        later = stats()
        assert later.write_bytes_count - counted.write_bytes_count >= len(content)
        assert later.read_bytes_count - counted.read_bytes_count >= len(content)
        assert later.write_ops_count > counted.write_ops_count
        connection.end()
        call(front.DeleteNvmeController, nvme.DeleteNvmeControllerRequest(name=controller.name))
        call(front.DeleteNvmeNamespace, nvme.DeleteNvmeNamespaceRequest(name=namespace.name))
        call(front.DeleteNvmeSubsystem, nvme.DeleteNvmeSubsystemRequest(name=subsystem.name))
        assert made_of_nvmet() == before
        call(volumes.DeleteAioVolume, aio.DeleteAioVolumeRequest(name=volume.name))
        assert str(file) not in run("losetup", "--list")
        assert file.read_bytes()[: len(content)] == content


def test_a_disk_is_a_volume_unless_it_is_mounted(tmp_path: Path) -> None:
    folder, place, file = tmp_path / "volumes", tmp_path / "place", tmp_path / "image"
    folder.mkdir()
    place.mkdir()
    make_disk(file, 4 << 20)
    with (
        looped(file) as device,
        Server("127.0.0.1:0", Storage(folder)) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        (folder / "disk").symlink_to(device)
        create = aio_grpc.AioVolumeServiceStub(channel).CreateAioVolume
        request = aio.CreateAioVolumeRequest(aio_volume=aio.AioVolume(filename=str(folder / "disk")))
        with mounted(device, place), pytest.raises(grpc.RpcError, match="busy"):
            create(request, timeout=DEADLINE_S)
        request.aio_volume.block_size = 4096
        with pytest.raises(grpc.RpcError, match="block_size 4096, must be 512"):
            create(request, timeout=DEADLINE_S)
        request.aio_volume.block_size = 0
        made = create(request, timeout=DEADLINE_S)
        assert (made.block_size, made.blocks_count) == (512, (4 << 20) // 512)
        assert run("losetup", "--list", "--noheadings").count("\n") == 1, "a disk needs no loop device"
