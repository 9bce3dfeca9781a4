// SPDX-License-Identifier: Apache-2.0
// The native receiver for Python. Nothing here holds the GIL while it waits or works.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "batch.hpp"
#include "bindings.hpp"
#include "numpy_arrays.hpp"
#include "receiver.hpp"
#include "sketch.hpp"
#include "socket_reader.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace sennit::offload {
namespace {

using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

void deliver(Receiver& receiver, const nb::bytes& datagram) {
  const Receiver::Datagram one(static_cast<const std::uint8_t*>(datagram.data()), datagram.size());
  const nb::gil_scoped_release others_may_run;
  receiver.take({&one, 1});
}

nb::tuple batch(const Receiver& receiver, std::uint32_t number, const Program& program,
                const std::vector<std::size_t>& dense, const std::vector<std::size_t>& sparse) {
  Batch made;
  {
    const nb::gil_scoped_release others_may_run;
    made = make_batch(receiver, number, program, dense, sparse);
  }
  nb::list values;
  for (const Batch::Values& table : made.values) values.append(to_numpy<std::int64_t, 1>(table.ids, {table.count}));
  return nb::make_tuple(to_numpy<float, 1>(made.labels, {made.rows}),
                        to_numpy<float, 2>(made.dense, {made.rows, dense.size()}),
                        to_numpy<std::int32_t, 2>(made.lengths, {sparse.size(), made.rows}), values);
}

using Counts = nb::ndarray<std::uint64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::size_t count(const Receiver& receiver, std::uint32_t batch, const Program& program,
                  const std::vector<std::size_t>& sparse, int sample_shift, const Counts& counts) {
  const SketchShape shape{counts.shape(2), counts.shape(1), sample_shift};
  const std::span<std::uint64_t> cells(counts.data(), counts.size());
  const nb::gil_scoped_release others_may_run;
  return count_ids(receiver, batch, program, sparse, shape, cells);
}

nb::tuple counters(const Receiver& receiver) {
  const FeedCounters counted = receiver.counters();
  return nb::make_tuple(counted.datagrams, counted.records, counted.filtered, counted.body_bytes);
}

// A caller that waits for rows gets the error that ended the thread.
void check(const SocketReader& reader) {
  if (const int error = reader.error(); error != 0)
    throw std::system_error(error, std::generic_category(), "cpu: the socket failed");
}

}  // namespace

void bind_receiver(nb::module_& module) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
  });
  nb::class_<DenseField>(module, "DenseField").def(nb::init<bool, bool>(), "is_bfloat16"_a, "is_wanted"_a);
  nb::class_<IdsField>(module, "IdsField")
      .def(nb::init<int, bool, std::uint32_t, bool, bool>(), "width_bytes"_a, "is_signed"_a, "length"_a, "is_list"_a,
           "is_wanted"_a);
  nb::class_<RecordSchema>(module, "RecordSchema")
      .def(nb::init<bool, bool, std::vector<DenseField>, std::vector<IdsField>>(), "is_big_endian"_a,
           "is_label_float"_a, "dense"_a, "ids"_a);
  nb::class_<RowFilters>(module, "RowFilters")
      .def(nb::init<>())
      .def("sample",
           [](RowFilters& self, std::uint64_t seed, std::uint64_t below) {
             self.samples.push_back({seed, below});
           })
      .def("keep_range",
           [](RowFilters& self, std::size_t dense, float low, float high) {
             self.ranges.push_back({dense, low, high});
           })
      .def("keep_length", [](RowFilters& self, std::size_t ids, std::int64_t least, std::int64_t most) {
        self.lengths.push_back({ids, least, most});
      });
  nb::class_<Receiver>(module, "Receiver")
      .def(
          "__init__",
          [](Receiver* self, const RecordSchema& schema, const RowFilters& filters, std::uint32_t schema_id,
             std::uint32_t session, std::uint32_t batch_rows, std::uint32_t slots) {
            new (self) Receiver(schema, filters, Session{schema_id, session}, batch_rows, slots);
          },
          "schema"_a, "filters"_a, nb::kw_only(), "schema_id"_a, "session"_a, "batch_rows"_a, "slots"_a)
      .def("deliver", &deliver)
      .def("rows_taken", &Receiver::rows_taken)
      .def("row_ahead", &Receiver::row_ahead)
      .def("release", &Receiver::release, WithoutGil())
      .def("counters", &counters)
      .def("batch", &batch)
      .def("count_ids", &count);
  nb::class_<SocketReader>(module, "SocketReader")
      .def(nb::init<std::shared_ptr<Receiver>, const std::string&, std::uint16_t, std::size_t>(), "receiver"_a,
           "address"_a, "port"_a, "receive_buffer_bytes"_a)
      .def_prop_ro("port", &SocketReader::port)
      .def_prop_ro("receive_buffer_bytes", &SocketReader::receive_buffer_bytes)
      .def_prop_ro("kernel_drops", &SocketReader::kernel_drops)
      .def("check", &check)
      .def(
          "stop", [](SocketReader& self, int timeout_ms) { self.stop(std::chrono::milliseconds(timeout_ms)); },
          "timeout_ms"_a, WithoutGil());
}

}  // namespace sennit::offload
