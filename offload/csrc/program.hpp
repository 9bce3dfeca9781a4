// SPDX-License-Identifier: Apache-2.0
// A plan as a list of steps over columns. Steps are added once; a run computes the columns of a whole batch.
#pragma once

#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "column.hpp"
#include "operators.hpp"

namespace sennit::offload {

class Program {
 public:
  std::size_t dense_source() { return add_source(true); }
  std::size_t ids_source() { return add_source(false); }

  template <typename Function, typename... Parameters>
  std::size_t add(std::size_t input, Function function, Parameters... parameters) {
    check(input);
    steps_.push_back([=](const Columns& columns) { return function(columns[input], parameters...); });
    return columns_++;
  }

  std::size_t add_cross(std::size_t left, std::size_t right) {
    check(left);
    check(right);
    steps_.push_back([=](const Columns& columns) { return cross(columns[left], columns[right]); });
    return columns_++;
  }

  // Whether each source is dense, in the order of adding.
  const std::vector<bool>& sources() const { return is_dense_; }

  // All columns of the program: the sources, followed by the result of each step.
  std::vector<Column> run(std::vector<Column> columns) const {
    if (columns.size() != is_dense_.size())
      throw std::invalid_argument(std::to_string(columns.size()) + " sources; the program has " +
                                  std::to_string(is_dense_.size()));
    for (std::size_t n = 0; n < columns.size(); n++) {
      if (columns[n].rows != columns[0].rows) throw std::invalid_argument("columns with different numbers of rows");
      if (columns[n].is_dense != is_dense_[n])
        throw std::invalid_argument("source " + std::to_string(n) + " is not of the program's type");
    }
    columns.reserve(columns_);
    for (const auto& step : steps_) columns.push_back(step(columns));
    return columns;
  }

 private:
  using Columns = std::vector<Column>;

  std::size_t add_source(bool is_dense) {
    if (!steps_.empty()) throw std::invalid_argument("sources come before steps");
    is_dense_.push_back(is_dense);
    return columns_++;
  }

  void check(std::size_t input) const {
    if (input >= columns_)
      throw std::invalid_argument("column " + std::to_string(input) + "; there are " + std::to_string(columns_));
  }

  std::size_t columns_ = 0;
  std::vector<bool> is_dense_;
  std::vector<std::function<Column(const Columns&)>> steps_;
};

// A column of a run. Throws std::invalid_argument if it is missing or of the other type.
inline const Column& column_of(const std::vector<Column>& columns, std::size_t number, bool is_dense) {
  if (number >= columns.size() || columns[number].is_dense != is_dense)
    throw std::invalid_argument("column " + std::to_string(number) + " is no " + (is_dense ? "dense" : "sparse") +
                                " column of the program");
  return columns[number];
}

}  // namespace sennit::offload
