// SPDX-License-Identifier: Apache-2.0
// Encoder and sender of records for Python. Both release the GIL.
#include "bindings.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "record_encoder.hpp"
#include "record_sender.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

template <typename Element>
using Vector = nb::ndarray<Element, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyVector = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = Vector<std::uint8_t>;
using ConstBytes = Vector<const std::uint8_t>;

template <typename Element>
std::span<Element> span_of(const Vector<Element>& vector) {
  return {vector.data(), vector.shape(0)};
}

// Columns, and owners of their memory.
class BoundColumns {
 public:
  BoundColumns(bool is_big_endian, Vector<const float> labels, bool is_binary, Matrix dense,
               std::vector<bool> is_bfloat16)
      : labels_(std::move(labels)), dense_(std::move(dense)) {
    columns_.rows = labels_.shape(0);
    columns_.is_big_endian = is_big_endian;
    columns_.labels = labels_.data();
    columns_.is_binary = is_binary;
    columns_.dense = dense_.data();
    columns_.is_bfloat16 = std::move(is_bfloat16);
    if (dense_.shape(0) != columns_.rows || dense_.shape(1) != columns_.is_bfloat16.size())
      throw std::invalid_argument("dense columns of another shape than labels and kinds");
  }

  void add_ids(AnyVector values, std::size_t width_bytes, std::size_t length) {
    IdsColumn column = ids_of(values, width_bytes);
    column.length = length;
    if (length < 1 || values.shape(0) / length != columns_.rows || values.shape(0) % length != 0)
      throw std::invalid_argument(std::to_string(values.shape(0)) + " ids for " + std::to_string(columns_.rows) +
                                  " rows of " + std::to_string(length));
    add(column, std::move(values));
  }

  void add_list(AnyVector values, Vector<const std::int64_t> offsets, std::size_t width_bytes,
                std::size_t length_bytes) {
    IdsColumn column = ids_of(values, width_bytes);
    column.offsets = offsets.data();
    column.length_bytes = length_bytes;
    const auto bounds = span_of(offsets);
    if (length_bytes != 1 && length_bytes != 2) throw std::invalid_argument("a length of another width than 1 or 2");
    if (bounds.size() != columns_.rows + 1 || bounds.front() < 0 || !std::is_sorted(bounds.begin(), bounds.end()) ||
        static_cast<std::size_t>(bounds.back()) > values.shape(0))
      throw std::invalid_argument("offsets that are not those of the ids");
    offsets_.push_back(std::move(offsets));
    add(column, std::move(values));
  }

  std::size_t record_bytes() const { return columns_.has_lists() ? 0 : columns_.fixed_bytes(); }
  std::uint64_t size_bytes() const { return encoded_bytes(columns_); }

  void encode(const Bytes& out, const std::optional<Vector<std::uint64_t>>& starts) const {
    const std::span<std::byte> bytes(reinterpret_cast<std::byte*>(out.data()), out.shape(0));
    const auto begins = starts ? span_of(*starts) : std::span<std::uint64_t>();
    nb::gil_scoped_release release;
    encode_records(columns_, bytes, begins);
  }

 private:
  static IdsColumn ids_of(const AnyVector& values, std::size_t width_bytes) {
    IdsColumn column;
    column.values = values.data();
    column.is_wide = values.dtype() == nb::dtype<std::int64_t>();
    column.width_bytes = width_bytes;
    if (!column.is_wide && values.dtype() != nb::dtype<std::int32_t>())
      throw std::invalid_argument("ids of another type than int32 or int64");
    if (width_bytes != 1 && width_bytes != 2 && width_bytes != 4 && width_bytes != 8)
      throw std::invalid_argument("ids of another width than 1, 2, 4 or 8 bytes");
    return column;
  }

  void add(const IdsColumn& column, AnyVector values) {
    columns_.ids.push_back(column);
    values_.push_back(std::move(values));
  }

  RecordColumns columns_;
  Vector<const float> labels_;
  Matrix dense_;
  std::vector<AnyVector> values_;
  std::vector<Vector<const std::int64_t>> offsets_;
};

// A sender, and the owner of its records' memory.
class BoundSender {
 public:
  BoundSender(ConstBytes bytes, std::optional<Vector<const std::uint64_t>> starts, std::size_t record_bytes,
              std::uint32_t schema_id, std::uint32_t session, std::size_t body_max_bytes)
      : bytes_(std::move(bytes)),
        starts_(std::move(starts)),
        count_(count(bytes_, starts_, record_bytes)),
        sender_(store(record_bytes), schema_id, session, body_max_bytes) {}

  std::tuple<std::uint32_t, std::uint32_t, int> send(int fd, const Vector<const std::int64_t>& records,
                                                     std::uint32_t batch, std::uint32_t first,
                                                     std::uint32_t packets_max) {
    const auto rows = checked(records);
    nb::gil_scoped_release release;
    const auto progress = sender_.send(fd, rows, batch, first, packets_max);
    return {progress.next_row, progress.packets, progress.error};
  }

  nb::list packets(const Vector<const std::int64_t>& records, std::uint32_t batch, std::uint32_t first) const {
    const auto rows = checked(records);
    std::vector<std::byte> memory(sender_.packet_max_bytes());
    nb::list found;
    for (std::uint32_t row = first; row < rows.size();) {
      const auto packet = sender_.pack(rows, batch, row, memory.data());
      found.append(nb::bytes(memory.data(), packet.size_bytes));
      row = packet.next_row;
    }
    return found;
  }

  bool is_segmenting() const { return sender_.is_segmenting(); }
  void send_apart() { sender_.send_apart(); }

 private:
  static std::size_t count(const ConstBytes& bytes, const std::optional<Vector<const std::uint64_t>>& starts,
                           std::size_t record_bytes) {
    if (starts) return starts->shape(0) == 0 ? 0 : starts->shape(0) - 1;
    return record_bytes == 0 ? 0 : bytes.shape(0) / record_bytes;
  }

  RecordStore store(std::size_t record_bytes) const {
    RecordStore made;
    made.bytes = {reinterpret_cast<const std::byte*>(bytes_.data()), bytes_.shape(0)};
    if (starts_) made.starts = span_of(*starts_);
    made.record_bytes = record_bytes;
    made.count = count_;
    return made;
  }

  std::span<const std::int64_t> checked(const Vector<const std::int64_t>& records) const {
    const auto rows = span_of(records);
    if (rows.size() > UINT32_MAX) throw std::invalid_argument("a batch of " + std::to_string(rows.size()) + " rows");
    for (const std::int64_t number : rows)
      if (number < 0 || static_cast<std::uint64_t>(number) >= count_)
        throw std::invalid_argument("record " + std::to_string(number) + "; there are " + std::to_string(count_));
    return rows;
  }

  ConstBytes bytes_;
  std::optional<Vector<const std::uint64_t>> starts_;
  std::size_t count_;
  RecordSender sender_;
};

}  // namespace

void bind_records(nb::module_& module) {
  module.def("packet_checksum", [](nb::handle packet) {
    Py_buffer view;
    if (PyObject_GetBuffer(packet.ptr(), &view, PyBUF_SIMPLE) != 0) nb::raise_python_error();
    const std::span bytes(static_cast<const std::uint8_t*>(view.buf), static_cast<std::size_t>(view.len));
    const bool has_header = bytes.size() >= HEADER_BYTES;
    const std::uint64_t found = has_header ? checksum_of(bytes) : 0;
    PyBuffer_Release(&view);
    if (!has_header)
      throw std::invalid_argument("a packet of " + std::to_string(bytes.size()) +
                                  " bytes; allowed: " + std::to_string(HEADER_BYTES) + " or more");
    return found;
  });
  nb::class_<BoundColumns>(module, "RecordColumns")
      .def(nb::init<bool, Vector<const float>, bool, Matrix, std::vector<bool>>())
      .def("add_ids", &BoundColumns::add_ids)
      .def("add_list", &BoundColumns::add_list)
      .def_prop_ro("record_bytes", &BoundColumns::record_bytes)
      .def_prop_ro("size_bytes", &BoundColumns::size_bytes)
      .def("encode", &BoundColumns::encode, nb::arg(), nb::arg().none());
  nb::class_<BoundSender>(module, "RecordSender")
      .def(nb::init<ConstBytes, std::optional<Vector<const std::uint64_t>>, std::size_t, std::uint32_t, std::uint32_t,
                    std::size_t>(),
           nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("send", &BoundSender::send)
      .def("packets", &BoundSender::packets)
      .def("send_apart", &BoundSender::send_apart)
      .def_prop_ro("is_segmenting", &BoundSender::is_segmenting);
}

}  // namespace sennit::offload
