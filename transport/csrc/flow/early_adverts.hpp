// SPDX-License-Identifier: Apache-2.0
// Adverts whose predecessors have not arrived: on several paths controls overtake each other all the time, and one
// that is thrown away is missed for a round trip.
#pragma once
#include <cstdint>
#include <vector>

#include "flow/control.hpp"
#include "flow/numbers.hpp"

namespace sennit::flow {

class EarlyAdverts {
 public:
  // `number` lies less than CREDIT_WINDOW above the next one that is taken.
  void keep(uint64_t number, const Advert& advert) {
    if (cells_.empty()) cells_.resize(CREDIT_WINDOW);  // most flows on one path never need them
    cells_[number % CREDIT_WINDOW] = {number, advert};
  }
  // Null: it has not come.
  const Advert* find(uint64_t number) const {
    if (cells_.empty()) return nullptr;
    const Cell& cell = cells_[number % CREDIT_WINDOW];
    return cell.number == number ? &cell.advert : nullptr;
  }
  void clear() { cells_.clear(); }

 private:
  struct Cell {
    uint64_t number = UINT64_MAX;
    Advert advert{};
  };
  std::vector<Cell> cells_;
};

}  // namespace sennit::flow
