// SPDX-License-Identifier: Apache-2.0
// Lines of text as a record batch of Arrow, for Python: what is parsed has `__arrow_c_array__`
// (https://arrow.apache.org/docs/format/CDataInterface/PyCapsuleInterface.html).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arrow_array.hpp"
#include "bindings.hpp"
#include "line_parser.hpp"

namespace nb = nanobind;

namespace sennit::offload {
namespace {

constexpr std::int64_t NULLABLE = 2;  // ARROW_FLAG_NULLABLE

// What a structure of the C data interface points to. It ends with `release`.
struct OwnedSchema {
  std::string format, name;
  std::vector<ArrowSchema*> children;
};

struct OwnedArray {
  std::array<const void*, 3> buffers{};
  std::vector<ArrowArray*> children;
  ParsedColumn column;
};

template <typename Owned, typename Part>
void release(Part* part) {
  auto* const owned = static_cast<Owned*>(part->private_data);
  // Whoever moved a child away has set its `release` to null, and releases it.
  for (Part* child : owned->children) {
    if (child->release != nullptr) child->release(child);
    delete child;
  }
  part->release = nullptr;
  delete owned;
}

ArrowSchema* schema_of(std::string format, std::string name, std::vector<ArrowSchema*> children = {}) {
  auto owned = std::make_unique<OwnedSchema>();
  owned->format = std::move(format);
  owned->name = std::move(name);
  owned->children = std::move(children);
  auto made = std::make_unique<ArrowSchema>();
  made->format = owned->format.c_str();
  made->name = owned->name.c_str();
  made->flags = NULLABLE;
  made->n_children = static_cast<std::int64_t>(owned->children.size());
  made->children = owned->children.data();
  made->release = release<OwnedSchema, ArrowSchema>;
  made->private_data = owned.release();
  return made.release();
}

ArrowArray* array_of(std::size_t rows, ParsedColumn column, std::vector<ArrowArray*> children = {}) {
  auto owned = std::make_unique<OwnedArray>();
  owned->column = std::move(column);
  owned->children = std::move(children);
  auto made = std::make_unique<ArrowArray>();
  const ParsedColumn& own = owned->column;
  std::size_t count = 1;
  if (own.null_count > 0) owned->buffers[0] = own.valid->data();
  if (own.offsets) owned->buffers[count++] = own.offsets->data();
  if (own.values) owned->buffers[count++] = own.values->data();
  made->length = static_cast<std::int64_t>(rows);
  made->null_count = own.null_count;
  made->n_buffers = static_cast<std::int64_t>(count);
  made->buffers = owned->buffers.data();
  made->n_children = static_cast<std::int64_t>(owned->children.size());
  made->children = owned->children.data();
  made->release = release<OwnedArray, ArrowArray>;
  made->private_data = owned.release();
  return made.release();
}

template <typename Part>
nb::capsule capsule(Part* part, const char* name) {
  return nb::capsule(part, name, [](void* held) noexcept {
    auto* const left = static_cast<Part*>(held);
    if (left->release != nullptr) left->release(left);
    delete left;
  });
}

// The rows of some lines.
class ParsedLines {
 public:
  ParsedLines(std::size_t rows, std::vector<ParsedColumn> columns, std::vector<std::string> formats,
              std::vector<std::string> names)
      : rows_(rows), columns_(std::move(columns)), formats_(std::move(formats)), names_(std::move(names)) {}

  nb::tuple arrow_c_array(const nb::object&) const {
    std::vector<ArrowSchema*> schemas;
    std::vector<ArrowArray*> arrays;
    for (std::size_t number = 0; number < columns_.size(); number++) {
      schemas.push_back(schema_of(formats_[number], names_[number]));
      arrays.push_back(array_of(rows_, columns_[number]));
    }
    return nb::make_tuple(capsule(schema_of("+s", "", std::move(schemas)), "arrow_schema"),
                          capsule(array_of(rows_, {}, std::move(arrays)), "arrow_array"));
  }

 private:
  std::size_t rows_;
  std::vector<ParsedColumn> columns_;
  std::vector<std::string> formats_, names_;
};

class NamedLineParser {
 public:
  NamedLineParser(const std::string& delimiter, std::vector<std::string> nulls, std::vector<std::string> names,
                  const std::vector<std::pair<std::size_t, std::string>>& columns)
      : names_(std::move(names)), parser_(sign(delimiter), names_.size(), std::move(nulls), parts(columns)) {}

  std::optional<ParsedLines> parse(const nb::bytes& text, std::size_t line_count) const {
    std::optional<std::vector<ParsedColumn>> found;
    {
      const nb::gil_scoped_release others_may_run;
      found = parser_.parse({text.c_str(), text.size()}, line_count);
    }
    if (!found) return std::nullopt;
    std::vector<std::string> formats, names;
    for (const LineParser::Column& column : parser_.columns()) {
      formats.push_back(column.format);
      names.push_back(names_[column.place]);
    }
    return ParsedLines(line_count, std::move(*found), std::move(formats), std::move(names));
  }

 private:
  static char sign(const std::string& delimiter) {
    if (delimiter.size() != 1) throw std::invalid_argument("delimiter " + delimiter + "; allowed: one byte");
    return delimiter.front();
  }
  static std::vector<LineParser::Column> parts(const std::vector<std::pair<std::size_t, std::string>>& columns) {
    std::vector<LineParser::Column> made;
    for (const auto& [place, format] : columns) made.push_back({place, format});
    return made;
  }

  std::vector<std::string> names_;
  LineParser parser_;
};

}  // namespace

void bind_text(nb::module_& module) {
  nb::class_<ParsedLines>(module, "ParsedLines")
      .def("__arrow_c_array__", &ParsedLines::arrow_c_array, nb::arg("requested_schema").none() = nb::none());
  nb::class_<NamedLineParser>(module, "LineParser")
      .def(nb::init<const std::string&, std::vector<std::string>, std::vector<std::string>,
                    const std::vector<std::pair<std::size_t, std::string>>&>(),
           nb::kw_only(), nb::arg("delimiter"), nb::arg("nulls"), nb::arg("names"), nb::arg("columns"))
      .def("parse", &NamedLineParser::parse);
}

}  // namespace sennit::offload
