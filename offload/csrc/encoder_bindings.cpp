// SPDX-License-Identifier: Apache-2.0
// Columns of Arrow as samples, and samples as batches, for Python. A column is what `__arrow_c_array__` of a
// `pyarrow.Array` gives: two capsules (https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html).
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string_view.h>

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
using Matrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A column that the capsules own: use it as long as they live.
struct ArrowColumn {
  const ArrowSchema* schema;
  const ArrowArray* array;

  explicit ArrowColumn(const nb::tuple& capsules)
      : schema(static_cast<const ArrowSchema*>(content(capsules, 0, "arrow_schema"))),
        array(static_cast<const ArrowArray*>(content(capsules, 1, "arrow_array"))) {}

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

  bool encode(const nb::tuple& capsules, Matrix out, std::size_t number) const {
    const ArrowColumn column(capsules);
    if (out.shape(0) != static_cast<std::size_t>(column.array->length) || number >= out.shape(1))
      throw std::invalid_argument("a matrix that has no such column of so many rows");
    const nb::gil_scoped_release others_may_run;
    return encoder_.encode(column.format(), *column.array, out.data() + number, out.shape(1));
  }

 private:
  std::optional<Vector<std::uint32_t>> table_;
  NumberEncoder encoder_;
};

nb::object encode_ids(const IdEncoder& encoder, const nb::tuple& capsules) {
  const ArrowColumn column(capsules);
  std::optional<EncodedIds> found;
  {
    const nb::gil_scoped_release others_may_run;
    found = encoder.encode(column.format(), column.leaf_format(), *column.array);
  }
  if (!found) return nb::none();
  const auto offsets = found->offsets ? to_numpy<std::int64_t, 1>(found->offsets, {found->offset_count}) : nb::none();
  if (found->narrow) return nb::make_tuple(to_numpy<std::int32_t, 1>(found->narrow, {found->count}), offsets);
  return nb::make_tuple(to_numpy<std::int64_t, 1>(found->wide, {found->count}), offsets);
}

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

IdsInMemory ids_in_memory(const nb::tuple& column, std::size_t samples) {
  IdsInMemory found;
  std::size_t count = 0, expected = samples;
  Vector<std::int32_t> narrow;
  Vector<std::int64_t> wide;
  if (nb::try_cast(column[0], narrow, false)) {
    found.narrow = narrow.data();
    count = narrow.shape(0);
  } else {
    wide = nb::cast<Vector<std::int64_t>>(column[0], false);
    found.wide = wide.data();
    count = wide.shape(0);
  }
  if (!column[1].is_none()) {
    const auto offsets = nb::cast<Vector<std::int64_t>>(column[1], false);
    found.offsets = offsets.data();
    if (offsets.shape(0) != samples + 1) throw std::invalid_argument("offsets of another number of samples");
    expected = static_cast<std::size_t>(found.offsets[samples]);
  }
  if (count != expected)
    throw std::invalid_argument(std::to_string(count) + " ids; allowed: " + std::to_string(expected));
  return found;
}

// `columns`: pairs of ids and offsets or None, each for `count` samples. `rows`: the samples that are picked.
nb::tuple gather(const nb::list& columns, std::size_t count, Vector<std::int64_t> rows) {
  std::vector<IdsInMemory> tables;
  for (const nb::handle column : columns) tables.push_back(ids_in_memory(nb::cast<nb::tuple>(column), count));
  const std::span<const std::int64_t> picked(rows.data(), rows.shape(0));
  Buffer<std::int32_t> lengths;
  Buffer<std::int64_t> values;
  std::size_t sum = 0;
  {
    const nb::gil_scoped_release others_may_run;
    for (const std::int64_t row : picked)
      if (row < 0 || static_cast<std::size_t>(row) >= count)
        throw std::out_of_range("sample " + std::to_string(row) + "; allowed: [0, " + std::to_string(count) + ")");
    lengths = buffer<std::int32_t>(tables.size() * picked.size());
    for (std::size_t table = 0; table < tables.size(); table++)
      sum += tables[table].lengths(picked, lengths->data() + table * picked.size());
    values = buffer<std::int64_t>(sum);
    std::int64_t* to = values->data();
    for (const IdsInMemory& table : tables) to = table.copy(picked, to);
  }
  return nb::make_tuple(to_numpy<std::int32_t, 2>(lengths, {tables.size(), picked.size()}),
                        to_numpy<std::int64_t, 1>(values, {sum}));
}

}  // namespace

void bind_encoder(nb::module_& module) {
  nb::class_<Vocabulary>(module, "Vocabulary").def("__init__", [](Vocabulary* self, const nb::tuple& values) {
    const ArrowColumn column(values);
    new (self) Vocabulary(column.format(), *column.array);
  });
  nb::class_<BoundNumbers>(module, "NumberEncoder")
      .def(nb::init<std::optional<std::pair<float, float>>, std::optional<Vector<std::uint32_t>>, double, double>(),
           nb::arg("clamp").none(), nb::arg("table").none(), nb::arg("mean"), nb::arg("deviation"))
      .def("encode", &BoundNumbers::encode);
  nb::class_<IdEncoder>(module, "IdEncoder")
      .def(nb::init<std::int64_t, std::optional<std::int64_t>, std::optional<std::int64_t>,
                    std::shared_ptr<const Vocabulary>>(),
           nb::arg("rows"), nb::arg("first").none(), nb::arg("salt").none(), nb::arg("vocabulary").none())
      .def("encode", &encode_ids);
  module.def("text_ids", &text_ids);
  module.def("gather", &gather);
}

}  // namespace sennit::offload
