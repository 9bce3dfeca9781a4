// SPDX-License-Identifier: Apache-2.0
// Columns of Arrow as samples, and samples as batches, for Python. A column is what `__arrow_c_array__` of a
// `pyarrow.Array` gives: two capsules (https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch_gather.hpp"
#include "bindings.hpp"
#include "id_encoder.hpp"
#include "number_encoder.hpp"
#include "numpy_arrays.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

template <typename Element>
using Vector = nb::ndarray<const Element, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A column that the capsules own: use it as long as they live.
struct ArrowColumn {
  const ArrowSchema* schema;
  const ArrowArray* array;

  explicit ArrowColumn(const nb::tuple& capsules)
      : schema(static_cast<const ArrowSchema*>(content(capsules, 0, "arrow_schema"))),
        array(static_cast<const ArrowArray*>(content(capsules, 1, "arrow_array"))) {}

  ArrowColumn(const ArrowSchema* its_schema, const ArrowArray* its_array) : schema(its_schema), array(its_array) {}

  ArrowColumn child(std::size_t number) const {
    if (number >= static_cast<std::size_t>(array->n_children))
      throw std::out_of_range("column " + std::to_string(number) + "; there are " + std::to_string(array->n_children));
    return {schema->children[number], array->children[number]};
  }
  // An index into a dictionary is no value.
  std::string_view format() const { return name(*schema); }
  std::string_view leaf_format() const { return schema->n_children == 1 ? name(*schema->children[0]) : ""; }

 private:
  static void* content(const nb::tuple& capsules, std::size_t number, const char* name) {
    void* found = PyCapsule_GetPointer(nb::handle(capsules[number]).ptr(), name);
    if (found == nullptr) nb::raise_python_error();
    return found;
  }
  static std::string_view name(const ArrowSchema& part) { return part.dictionary == nullptr ? part.format : "?"; }
};

class BoundNumbers {
 public:
  BoundNumbers(std::optional<std::pair<float, float>> clamp, std::optional<Vector<std::uint32_t>> table, double mean,
               double deviation)
      : table_(std::move(table)), encoder_{.clamp = clamp, .mean = mean, .deviation = deviation} {
    if (!table_) return;
    if (!std::has_single_bit(table_->shape(0)) || table_->shape(0) > 1u << 31 || table_->shape(0) < 2)
      throw std::invalid_argument("a table of " + std::to_string(table_->shape(0)) +
                                  " entries; allowed: a power of two, 2 to 2^31");
    encoder_.table = table_->data();
    encoder_.table_bits = std::bit_width(table_->shape(0)) - 1;
  }

  const NumberEncoder& encoder() const { return encoder_; }

 private:
  std::optional<Vector<std::uint32_t>> table_;
  NumberEncoder encoder_;
};

// All columns of a batch.
class BatchEncoder {
 public:
  BatchEncoder(std::vector<BoundNumbers> numbers, std::vector<IdEncoder> ids)
      : numbers_(std::move(numbers)), ids_(std::move(ids)) {}

  // The places say which column of the batch is for which encoder, and which ones are labels and weights.
  nb::object encode(const nb::tuple& capsules, const std::vector<std::size_t>& number_places,
                    const std::vector<std::size_t>& id_places, const std::vector<std::size_t>& label_places,
                    std::optional<std::size_t> weight_place) const {
    const ArrowColumn batch(capsules);
    if (batch.format() != "+s" || batch.array->offset != 0)
      throw std::invalid_argument("a batch of format " + std::string(batch.format()) + "; allowed: +s");
    const auto rows = static_cast<std::size_t>(batch.array->length);
    if (number_places.size() != numbers_.size() || id_places.size() != ids_.size())
      throw std::invalid_argument("another number of columns than of encoders");
    auto dense = buffer<float>(rows * numbers_.size());
    auto labels = buffer<float>(rows * label_places.size());
    Buffer<float> weights;
    std::vector<EncodedIds> found;
    bool is_fine = true;
    {
      const nb::gil_scoped_release others_may_run;
      for (std::size_t number = 0; number < label_places.size(); number++) {
        const ArrowColumn column = batch.child(label_places[number]);
        is_fine &= read_labels(column.format(), *column.array, labels->data() + number, label_places.size());
      }
      if (weight_place) {
        const ArrowColumn column = batch.child(*weight_place);
        weights = buffer<float>(rows);
        is_fine &= read_weights(column.format(), *column.array, weights->data());
      }
      for (std::size_t first = 0; first < rows; first += NumberEncoder::ROWS_MAX)
        for (std::size_t number = 0; number < numbers_.size(); number++) {
          const ArrowColumn column = batch.child(number_places[number]);
          is_fine &= numbers_[number].encoder().encode(
              column.format(), *column.array, first, std::min(rows - first, NumberEncoder::ROWS_MAX),
              dense->data() + first * numbers_.size() + number, numbers_.size());
        }
      for (std::size_t number = 0; is_fine && number < ids_.size(); number++) {
        const ArrowColumn column = batch.child(id_places[number]);
        auto ids = ids_[number].encode(column.format(), column.leaf_format(), *column.array);
        is_fine = ids.has_value();
        if (is_fine) found.push_back(std::move(*ids));
      }
    }
    if (!is_fine) return nb::none();
    nb::list columns;
    for (const EncodedIds& ids : found) columns.append(arrays(ids));
    return nb::make_tuple(to_numpy<float, 2>(dense, {rows, numbers_.size()}),
                          label_places.size() == 1 ? to_numpy<float, 1>(labels, {rows})
                                                   : to_numpy<float, 2>(labels, {rows, label_places.size()}),
                          weights ? to_numpy<float, 1>(weights, {rows}) : nb::none(), columns);
  }

 private:
  static nb::tuple arrays(const EncodedIds& ids) {
    const auto offsets = ids.offsets ? to_numpy<std::int64_t, 1>(ids.offsets, {ids.offset_count}) : nb::none();
    if (ids.narrow) return nb::make_tuple(to_numpy<std::int32_t, 1>(ids.narrow, {ids.count}), offsets);
    return nb::make_tuple(to_numpy<std::int64_t, 1>(ids.wide, {ids.count}), offsets);
  }

  std::vector<BoundNumbers> numbers_;
  std::vector<IdEncoder> ids_;
};

nb::object text_ids(const nb::tuple& capsules) {
  const ArrowColumn column(capsules);
  if (column.format() != "U")
    throw std::invalid_argument("a column of format " + std::string(column.format()) + "; allowed: U");
  const auto count = static_cast<std::size_t>(column.array->length);
  auto found = buffer<std::int64_t>(count);
  {
    const nb::gil_scoped_release others_may_run;
    const Texts<std::int64_t> texts(*column.array);
    for (std::size_t i = 0; i < count; i++)
      (*found)[i] = id_of(texts[static_cast<std::size_t>(column.array->offset) + i]);
  }
  return to_numpy<std::int64_t, 1>(found, {count});
}

std::uint64_t content_hash(const nb::bytes& content) {
  const nb::gil_scoped_release others_may_run;
  return xxh64(content.c_str(), content.size());
}

// Samples in memory, of which batches are gathered.
class SamplesInMemory {
 public:
  // `columns`: pairs of ids and offsets or None, each for as many samples as `dense` has rows.
  SamplesInMemory(Matrix dense, const nb::list& columns) : dense_(std::move(dense)), count_(dense_.shape(0)) {
    for (const nb::handle column : columns) add(nb::cast<nb::tuple>(column));
  }

  // `rows`: the samples that are picked.
  nb::tuple gather(Vector<std::int64_t> rows) const {
    const std::span<const std::int64_t> samples(rows.data(), rows.shape(0));
    const std::size_t width = dense_.shape(1);
    Buffer<float> dense;
    Buffer<std::int32_t> lengths;
    Buffer<std::int64_t> values;
    std::size_t sum = 0;
    {
      const nb::gil_scoped_release others_may_run;
      for (const std::int64_t row : samples)
        if (row < 0 || static_cast<std::size_t>(row) >= count_)
          throw std::out_of_range("sample " + std::to_string(row) + "; allowed: [0, " + std::to_string(count_) + ")");
      const Picked picked(samples);
      dense = buffer<float>(samples.size() * width);
      picked.copy(dense_.data(), width, dense->data());
      lengths = buffer<std::int32_t>(tables_.size() * samples.size());
      for (std::size_t table = 0; table < tables_.size(); table++)
        sum += tables_[table].lengths(picked, lengths->data() + table * samples.size());
      values = buffer<std::int64_t>(sum);
      std::int64_t* to = values->data();
      for (const IdsInMemory& table : tables_) to = table.copy(picked, to);
    }
    return nb::make_tuple(to_numpy<float, 2>(dense, {samples.size(), width}),
                          to_numpy<std::int32_t, 2>(lengths, {tables_.size(), samples.size()}),
                          to_numpy<std::int64_t, 1>(values, {sum}));
  }

 private:
  void add(const nb::tuple& column) {
    IdsInMemory& table = tables_.emplace_back();
    std::size_t ids = 0, expected = count_;
    if (Vector<std::int32_t> narrow; nb::try_cast(column[0], narrow, false)) {
      table.narrow = narrow.data();
      ids = narrow.shape(0);
    } else {
      const auto wide = nb::cast<Vector<std::int64_t>>(column[0], false);
      table.wide = wide.data();
      ids = wide.shape(0);
    }
    if (!column[1].is_none()) {
      const auto offsets = nb::cast<Vector<std::int64_t>>(column[1], false);
      if (offsets.shape(0) != count_ + 1) throw std::invalid_argument("offsets of another number of samples");
      table.offsets = offsets.data();
      expected = static_cast<std::size_t>(table.offsets[count_]);
    }
    if (ids != expected)
      throw std::invalid_argument(std::to_string(ids) + " ids; allowed: " + std::to_string(expected));
    arrays_.push_back(column);
  }

  Matrix dense_;
  std::size_t count_;
  std::vector<IdsInMemory> tables_;
  std::vector<nb::tuple> arrays_;  // what the tables point to
};

}  // namespace

void bind_encoder(nb::module_& module) {
  nb::class_<Vocabulary>(module, "Vocabulary").def("__init__", [](Vocabulary* self, const nb::tuple& values) {
    const ArrowColumn column(values);
    new (self) Vocabulary(column.format(), *column.array);
  });
  nb::class_<BoundNumbers>(module, "NumberEncoder")
      .def(nb::init<std::optional<std::pair<float, float>>, std::optional<Vector<std::uint32_t>>, double, double>(),
           nb::arg("clamp").none(), nb::arg("table").none(), nb::arg("mean"), nb::arg("deviation"));
  nb::class_<IdEncoder>(module, "IdEncoder")
      .def(nb::init<std::int64_t, std::optional<std::int64_t>, std::optional<std::int64_t>,
                    std::shared_ptr<const Vocabulary>, bool>(),
           nb::arg("rows"), nb::arg("first").none(), nb::arg("salt").none(), nb::arg("vocabulary").none(),
           nb::arg("hashes") = true);
  nb::class_<BatchEncoder>(module, "BatchEncoder")
      .def(nb::init<std::vector<BoundNumbers>, std::vector<IdEncoder>>())
      .def("encode", &BatchEncoder::encode, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none());
  nb::class_<SamplesInMemory>(module, "SamplesInMemory")
      .def(nb::init<Matrix, const nb::list&>())
      .def("gather", &SamplesInMemory::gather);
  module.def("text_ids", &text_ids);
  module.def("content_hash", &content_hash);
}

}  // namespace sennit::offload
