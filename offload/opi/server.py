# SPDX-License-Identifier: Apache-2.0
"""Serves OPI's interfaces over gRPC. A method that is not served is answered UNIMPLEMENTED."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Final

import grpc
from google.protobuf import message_factory
from pydpu.proto.v1 import backend_aio_pb2, frontend_nvme_pb2, inventory_pb2

from sennit.errors import DeviceError
from sennit.offload.opi import inventory
from sennit.offload.opi.resources import Message, Refused
from sennit.offload.opi.storage import Storage

THREADS: Final = 4
# More requests at once are refused (RESOURCE_EXHAUSTED): one waits for the kernel, the others for that one.
REQUESTS_MAX: Final = 64
GRACE_S: Final = 5.0
CODES: Final = {
    errno.EEXIST: grpc.StatusCode.ALREADY_EXISTS,
    errno.EPERM: grpc.StatusCode.PERMISSION_DENIED,
    errno.EACCES: grpc.StatusCode.PERMISSION_DENIED,
    errno.EADDRINUSE: grpc.StatusCode.FAILED_PRECONDITION,
    errno.EADDRNOTAVAIL: grpc.StatusCode.FAILED_PRECONDITION,
    errno.EBUSY: grpc.StatusCode.FAILED_PRECONDITION,
    errno.ENOSPC: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Server:
    """Listens from the first. `address` is HOST:PORT; no host: all; port 0: any free one. `port` is the one it has.

    Raises DeviceError if it cannot listen there. `close` ends it, and all that clients made.
    """

    def __init__(self, address: str, storage: Storage) -> None:
        self._storage = storage
        # Storage is changed by one request at a time.
        self._lock = threading.Lock()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(THREADS, "opi"),
            options=[("grpc.so_reuseport", 0)],  # otherwise a second server on the port would get half of the calls
            maximum_concurrent_rpcs=REQUESTS_MAX,
        )
        described = (
            inventory_pb2.DESCRIPTOR.services_by_name["InventoryService"],
            backend_aio_pb2.DESCRIPTOR.services_by_name["AioVolumeService"],
            frontend_nvme_pb2.DESCRIPTOR.services_by_name["FrontendNvmeService"],
        )
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(each.full_name, dict(self._handlers(each))) for each in described]
        )
        self.port = self._listen(address)
        self._server.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.stop(GRACE_S).wait()
        with self._lock:
            self._storage.close()

    def GetInventory(self, request: Message) -> Message:
        del request  # its name is this machine's, whatever it is
        return inventory.read()

    def _listen(self, address: str) -> int:
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # gRPC does not say why it cannot listen.
            with socket.socket(family) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind((host.strip("[]").encode("idna"), int(port)))
            found: int = self._server.add_insecure_port(f"{host or '[::]'}:{port}")
        except OSError as error:
            raise DeviceError.told(f"cannot listen at {address}: {error.strerror}", error.errno) from None
        except UnicodeError:
            raise DeviceError(f"cannot listen at {address}: no name of a host") from None
        except RuntimeError as error:  # somebody else was quicker
            raise DeviceError(f"cannot listen at {address}: {error}") from None
        return found

    def _handlers(self, service: Any) -> Iterator[tuple[str, Any]]:
        for method in service.methods:
            served = getattr(self, method.name, None) or getattr(self._storage, method.name, None)
            yield (
                method.name,
                grpc.unary_unary_rpc_method_handler(
                    self._guarded(method.name, served),
                    request_deserializer=message_factory.GetMessageClass(method.input_type).FromString,
                    response_serializer=lambda response: response.SerializeToString(),
                ),
            )

    def _guarded(self, name: str, served: Callable[[Message], Message] | None) -> Callable[[Message, Any], Message]:
        def refuse(request: Message, context: Any) -> Message:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{name} is not served")

        if served is None:
            return refuse

        def answer(request: Message, context: Any) -> Message:
            try:
                with self._lock:
                    return served(request)
            except Refused as refused:
                context.abort(refused.code, str(refused))
            except OSError as error:
                context.abort(CODES.get(error.errno or 0, grpc.StatusCode.INTERNAL), str(error))

        return answer
