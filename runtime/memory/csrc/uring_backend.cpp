// SPDX-License-Identifier: Apache-2.0
// io_uring (Axboe 2019) through liburing. The library is opened at run time, so an installed sennit runs without it.
#include "backend.hpp"

#ifdef SENNIT_LIBURING
#include <dlfcn.h>
#include <liburing.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#endif

namespace sennit::memory {

#ifdef SENNIT_LIBURING
namespace {

constexpr const char* FILE_NAME = "liburing.so.2";

// Functions that are not inline in liburing.h.
struct Library {
  decltype(&io_uring_queue_init) queue_init = nullptr;
  decltype(&io_uring_queue_exit) queue_exit = nullptr;
  decltype(&io_uring_submit_and_wait) submit_and_wait = nullptr;
  std::string problem;
};

const Library& library() {
  static const Library found = [] {
    Library out;
    void* handle = dlopen(FILE_NAME, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      const char* why = dlerror();
      out.problem = why != nullptr ? why : FILE_NAME;
      return out;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
      if (function == nullptr) out.problem = std::string(FILE_NAME) + " has no " + name;
    };
    find(out.queue_init, "io_uring_queue_init");
    find(out.queue_exit, "io_uring_queue_exit");
    find(out.submit_and_wait, "io_uring_submit_and_wait");
    return out;
  }();
  return found;
}

class UringBackend final : public Backend {
 public:
  UringBackend(int descriptor, const io_uring& ring, unsigned depth)
      : descriptor_(descriptor), ring_(ring), depth_(depth) {}

  ~UringBackend() override {
    library().queue_exit(&ring_);
    close(descriptor_);
  }

  void run(std::span<Operation> operations) override {
    std::size_t submitted = 0, done = 0;
    while (done < operations.size()) {
      while (submitted < operations.size() && submitted - done < depth_) {
        io_uring_sqe* entry = io_uring_get_sqe(&ring_);
        if (entry == nullptr) break;
        Operation& operation = operations[submitted++];
        // The field has 32 bits: a longer transfer is cut short, and the rest is requested again.
        const auto size = static_cast<unsigned>(std::min<std::size_t>(operation.size_bytes, 1u << 30));
        if (operation.kind == Operation::Kind::READ)
          io_uring_prep_read(entry, descriptor_, operation.data, size, operation.offset);
        else
          io_uring_prep_write(entry, descriptor_, operation.data, size, operation.offset);
        io_uring_sqe_set_data(entry, &operation);
      }
      // Waiting for a quarter of the operations in flight saves system calls and keeps the device busy.
      const auto under_way = static_cast<unsigned>(submitted - done);
      const int status = library().submit_and_wait(&ring_, std::max(1u, under_way / 4));
      if (status < 0 && status != -EINTR && status != -EAGAIN && status != -EBUSY) {
        fail(operations.subspan(done), status);
        return;
      }
      io_uring_cqe* completion = nullptr;
      unsigned head = 0, count = 0;
      io_uring_for_each_cqe(&ring_, head, completion) {
        static_cast<Operation*>(io_uring_cqe_get_data(completion))->result = completion->res;
        count++;
      }
      io_uring_cq_advance(&ring_, count);
      done += count;
    }
  }

  int sync() override { return fdatasync(descriptor_) == 0 ? 0 : errno; }

  const char* name() const override { return "io_uring"; }

 private:
  // The ring itself failed, so it is unknown which operations happened.
  static void fail(std::span<Operation> operations, int status) {
    for (Operation& operation : operations) operation.result = status;
  }

  int descriptor_;
  io_uring ring_;
  unsigned depth_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(int descriptor, unsigned depth, std::string& problem) {
  const Library& found = library();
  problem = found.problem;
  if (!problem.empty()) return nullptr;
  io_uring ring{};
  if (const int status = found.queue_init(std::max(depth, 1u), &ring, 0); status < 0) {
    problem = std::string("the kernel refuses a ring: ") + std::strerror(-status);
    return nullptr;
  }
  return std::make_unique<UringBackend>(descriptor, ring, std::max(depth, 1u));
}
#else
std::unique_ptr<Backend> make_uring_backend(int, unsigned, std::string& problem) {
  problem = "built without liburing";
  return nullptr;
}
#endif

}  // namespace sennit::memory
