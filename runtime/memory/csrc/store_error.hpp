// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace sennit::memory {

// Who must act on an error of a store.
enum class Fault {
  ARGUMENT,  // the caller: an argument of one call; nothing was read or written
  FOREIGN,   // the caller: the file is not a store, or holds other tables
  CORRUPT,   // the operator: bytes that were written once are lost
  DEVICE,    // the operator: the operating system refused; `error_number` says why
  NO_ROOM,   // the caller: a batch does not fit the cache, which is as it was
};

class StoreError : public std::runtime_error {
 public:
  StoreError(Fault fault, const std::string& what, int error_number = 0)
      : std::runtime_error(what), fault(fault), error_number(error_number) {}

  Fault fault;
  int error_number;
};

}  // namespace sennit::memory
