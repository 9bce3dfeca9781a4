// SPDX-License-Identifier: Apache-2.0
// A receiver behind a loopback socket.
#include <arpa/inet.h>
#include <doctest/doctest.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <system_error>
#include <thread>

#include "packets.hpp"
#include "socket_reader.hpp"

using namespace sennit::offload;
using namespace std::chrono_literals;

namespace {

constexpr std::uint32_t ROWS = 4096, SLOTS = 2;
constexpr std::size_t BUFFER_BYTES = 1 << 20;

std::shared_ptr<Receiver> new_receiver() {
  return std::make_shared<Receiver>(big_endian_schema(), RowFilters{}, Session{7, 9}, ROWS, SLOTS);
}

class Sender {
 public:
  explicit Sender(std::uint16_t port) : fd_(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(connect(fd_, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
  }
  ~Sender() { close(fd_); }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  void send(const Bytes& datagram) const {
    REQUIRE(::send(fd_, datagram.data(), datagram.size(), 0) == static_cast<ssize_t>(datagram.size()));
  }

 private:
  int fd_;
};

void wait_until(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (!holds()) {
    REQUIRE(std::chrono::steady_clock::now() < end);
    std::this_thread::yield();
  }
}

}  // namespace

TEST_CASE("what comes to the port is taken, an empty datagram too, until the reader is stopped") {
  const auto receiver = new_receiver();
  SocketReader reader(receiver, "127.0.0.1", 0, BUFFER_BYTES);
  REQUIRE(reader.port() != 0);
  const Sender sender(reader.port());
  for (std::uint32_t row = 0; row < 1000; row++) {
    sender.send(packet({.row = row}, record(static_cast<std::int16_t>(row), row % 3)));
    wait_until([&] { return receiver->rows_taken(0) == row + 1; });
  }
  sender.send({});
  wait_until([&] { return receiver->counters().datagrams[static_cast<std::size_t>(Verdict::truncated)] == 1; });
  CHECK(receiver->content(0).columns[4].values[999] == 999);
  CHECK(reader.kernel_drops() == 0);
  CHECK(reader.error() == 0);
  reader.stop(5s);
  reader.stop(5s);
  CHECK(reader.error() == 0);
}

TEST_CASE("a reader ends at once while datagrams keep coming") {
  const auto receiver = new_receiver();
  auto reader = std::make_unique<SocketReader>(receiver, "127.0.0.1", 0, BUFFER_BYTES);
  const Sender sender(reader->port());
  const auto taken = [&] { return receiver->counters().datagrams[static_cast<std::size_t>(Verdict::foreign)]; };
  wait_until([&] {
    sender.send(Bytes(100));
    return taken() > 1000;
  });
  reader->stop(5s);
  reader.reset();
  const auto before = taken();
  CHECK(taken() == before);
}

TEST_CASE("what cannot be bound is named") {
  const auto receiver = new_receiver();
  const auto refused = [&](const char* address, std::uint16_t port, const char* message) {
    CHECK_THROWS_WITH_AS(SocketReader(receiver, address, port, BUFFER_BYTES), doctest::Contains(message),
                         std::system_error);
  };
  refused("192.0.2.1", 0, "192.0.2.1 port 0 is not an address of this machine");
  const SocketReader first(receiver, "127.0.0.1", 0, BUFFER_BYTES);
  refused("127.0.0.1", first.port(), "is taken by another process");
  CHECK_THROWS_WITH_AS(SocketReader(receiver, "localhost", 0, BUFFER_BYTES), doctest::Contains("\"localhost\""),
                       std::invalid_argument);
}

TEST_CASE("a socket that fails ends the thread, which says so") {
  const SocketReader reader(new_receiver(), "127.0.0.1", 0, BUFFER_BYTES);
  const std::uint16_t port = reader.port();
  const int other = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  const Sender sender(port);
  REQUIRE(dup2(other, reader.fd()) == reader.fd());
  close(other);
  sender.send({});  // to the old socket, whose thread waits for it
  wait_until([&] { return reader.error() != 0; });
  CHECK(reader.error() == ENOTSOCK);
}
