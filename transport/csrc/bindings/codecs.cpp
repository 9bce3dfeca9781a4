// SPDX-License-Identifier: Apache-2.0
#include "bindings/codecs.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <string>
#include <tuple>

#include "bindings/errors.hpp"
#include "codec/codec.hpp"
#include "reduce/fold.hpp"

namespace sennit::bindings {
namespace {

using namespace nb::literals;

// Kind, block, stochastic, seed.
using Given = std::tuple<uint32_t, uint32_t, bool, uint64_t>;

CodecSpec spec_of(const Given& given) {
  const auto& [kind, block, is_stochastic, seed] = given;
  return {static_cast<CodecKind>(kind), block, is_stochastic, seed};
}

CodecSpec checked(const Given& given, uint32_t dtype) {
  const CodecSpec spec = spec_of(given);
  const std::string refusal = codec_refusal(spec, static_cast<sennit_dtype>(dtype));
  if (!refusal.empty()) raise_status(SENNIT_ARGUMENT, refusal);
  return spec;
}

class Buffer {
 public:
  Buffer(const nb::object& object, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) != 0)
      throw nb::python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  std::span<std::byte> bytes() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

 private:
  Py_buffer view_;
};

void need(const char* name, size_t has, size_t needs) {
  if (has == needs) return;
  raise_status(SENNIT_ARGUMENT,
               std::string(name) + " has " + std::to_string(has) + " bytes; needed: " + std::to_string(needs));
}

}  // namespace

void bind_codecs(nb::module_& module) {
  module.def(
      "codec_refusal",
      [](const Given& codec, uint32_t dtype) {
        return codec_refusal(spec_of(codec), static_cast<sennit_dtype>(dtype));
      },
      "codec"_a, "dtype"_a, "Why elements of this type cannot be coded so; empty if they can.");
  module.def(
      "coded_bytes",
      [](const Given& codec, uint32_t dtype, uint64_t count) {
        return coded_bytes(checked(codec, dtype), static_cast<sennit_dtype>(dtype), count);
      },
      "codec"_a, "dtype"_a, "count"_a, "The bytes of so many coded elements.");
  module.def(
      "encode",
      [](const Given& codec, uint32_t dtype, const nb::object& source, uint64_t first_index,
         const nb::object& destination, const nb::object& residual) {
        const CodecSpec spec = checked(codec, dtype);
        const auto type = static_cast<sennit_dtype>(dtype);
        const Buffer from(source, false), to(destination, true),
            lost(residual.is_none() ? destination : residual, true);
        const uint64_t count = from.bytes().size() / element_size_bytes(type);
        need("source", from.bytes().size(), count * element_size_bytes(type));
        if (!residual.is_none()) need("residual", lost.bytes().size(), count * sizeof(float));
        float* const kept = residual.is_none() ? nullptr : reinterpret_cast<float*>(lost.bytes().data());
        return guarded([&] {
          const nb::gil_scoped_release release;
          return encode(spec, type, from.bytes().data(), count, first_index, to.bytes(), kept);
        });
      },
      "codec"_a, "dtype"_a, "source"_a, "first_index"_a, "destination"_a, "residual"_a = nb::none(),
      "Codes the elements of a buffer into another one; the bytes written.");
  module.def(
      "decode",
      [](const Given& codec, uint32_t dtype, const nb::object& coded, uint64_t count, uint32_t result,
         const nb::object& destination) {
        const CodecSpec spec = checked(codec, dtype);
        const auto type = static_cast<sennit_dtype>(dtype), given = static_cast<sennit_dtype>(result);
        const Buffer from(coded, false), to(destination, true);
        const uint64_t size = element_size_bytes(given);
        if (count > to.bytes().size() || size == 0) raise_status(SENNIT_ARGUMENT, "destination is too small");
        need("destination", to.bytes().size(), count * size);
        const nb::gil_scoped_release release;
        return decode(spec, type, from.bytes(), count, given, to.bytes().data());
      },
      "codec"_a, "dtype"_a, "coded"_a, "count"_a, "result"_a, "destination"_a,
      "Gives back elements; False if the bytes are no coded form of so many.");
}

}  // namespace sennit::bindings
