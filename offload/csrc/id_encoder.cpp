// SPDX-License-Identifier: Apache-2.0
#include "id_encoder.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <type_traits>

#include "id_kernels.hpp"

namespace sennit::offload {
namespace {

// The samples of a column, and which leaves each has.
class Samples {
 public:
  Samples(std::string_view format, const ArrowArray& column)
      : first_(static_cast<std::size_t>(column.offset)),
        count_(static_cast<std::size_t>(column.length)),
        lists_(Lists::of(format, column)),
        null_(column) {}

  bool are_lists() const { return lists_.has_value(); }
  std::size_t count() const { return count_; }
  std::size_t begin(std::size_t sample) const { return lists_ ? lists_->begin(first_ + sample) : first_ + sample; }
  std::size_t end(std::size_t sample) const { return lists_ ? lists_->end(first_ + sample) : first_ + sample + 1; }
  // A null list may cover leaves that nobody may see.
  bool is_empty(std::size_t sample) const { return lists_ && null_(first_ + sample); }
  bool are_contiguous() const { return !lists_ || null_.none(); }
  std::size_t leaves_max() const {
    std::size_t sum = 0;
    if (are_contiguous()) return count_ == 0 ? 0 : end(count_ - 1) - begin(0);
    for (std::size_t sample = 0; sample < count_; sample++)
      if (!is_empty(sample)) sum += end(sample) - begin(sample);
    return sum;
  }

 private:
  std::size_t first_, count_;
  std::optional<Lists> lists_;
  Nulls null_;
};

// False if an id is outside [0, rows). Minimum and maximum of 32 bits are vectorised, comparisons of 64 bits are not.
bool narrow(const std::int64_t* ids, std::size_t count, std::int64_t rows, std::int32_t* to) {
  std::uint64_t bits = 0;
  std::int32_t most = 0;
  for (std::size_t i = 0; i < count; i++) {
    const auto low = static_cast<std::int32_t>(ids[i]);
    bits |= static_cast<std::uint64_t>(ids[i]);
    most = std::max(most, low);
    to[i] = low;
  }
  return bits <= std::numeric_limits<std::int32_t>::max() && (most < rows || count == 0);
}

bool are_inside(const std::int64_t* ids, std::size_t count, std::int64_t rows) {
  int outside = 0;
  for (std::size_t i = 0; i < count; i++)
    outside |= static_cast<int>(static_cast<std::uint64_t>(ids[i]) >= static_cast<std::uint64_t>(rows));
  return outside == 0;
}

}  // namespace

// Ids one after another, as int64, and where those of each sample begin.
struct IdEncoder::Flat {
  Samples samples;
  // Those of the column itself, or `own`.
  const std::int64_t* ids = nullptr;
  Buffer<std::int64_t> own;
  std::size_t count = 0;
  Buffer<std::int64_t> offsets;  // nothing: one for each sample
};

bool IdEncoder::read(std::string_view format, const ArrowArray& leaf, Flat& flat) const {
  const Samples& samples = flat.samples;
  const Nulls null(leaf);
  const bool keeps_nulls = vocabulary_ != nullptr;
  // A column of nulls has no buffers.
  const bool is_nothing = format == "n";
  const bool drops = !keeps_nulls && (is_nothing || !null.none());
  const auto run = [&](auto id_at) {
    flat.own = buffer<std::int64_t>(samples.leaves_max());
    flat.ids = flat.own->data();
    std::int64_t* to = flat.own->data();
    const auto copy = [&](std::size_t begin, std::size_t end) {
      if (is_nothing || !null.none()) {
        for (std::size_t i = begin; i < end; i++) {
          if (!is_nothing && !null(i))
            *to++ = id_at(i);
          else if (keeps_nulls)
            *to++ = Vocabulary::UNKNOWN_ROW;
        }
        return;
      }
      for (std::size_t i = begin; i < end; i++) *to++ = id_at(i);
    };
    const std::size_t count = samples.count();
    if (drops && !is_nothing && !samples.are_lists()) {
      flat.offsets = buffer<std::int64_t>(count + 1);
      std::int64_t *ids = to, kept = 0;
      (*flat.offsets)[0] = 0;
      // Without branches: a null has a value, too, which the next one replaces.
      for (std::size_t i = 0, at = samples.begin(0); i < count; i++, at++) {
        ids[kept] = id_at(at);
        kept += static_cast<std::int64_t>(!null(at));
        (*flat.offsets)[i + 1] = kept;
      }
      to += kept;
    } else if (samples.are_lists() || drops) {
      flat.offsets = buffer<std::int64_t>(count + 1);
      std::int64_t* offsets = flat.offsets->data();
      offsets[0] = 0;
      if (samples.are_contiguous() && !drops && count > 0) {
        const std::size_t begin = samples.begin(0);
        for (std::size_t sample = 0; sample < count; sample++)
          offsets[sample + 1] = static_cast<std::int64_t>(samples.end(sample) - begin);
        copy(begin, samples.end(count - 1));
      } else {
        for (std::size_t sample = 0; sample < count; sample++) {
          if (!samples.is_empty(sample)) copy(samples.begin(sample), samples.end(sample));
          offsets[sample + 1] = to - flat.ids;
        }
      }
    } else if (count > 0) {
      copy(samples.begin(0), samples.end(count - 1));
    }
    flat.count = static_cast<std::size_t>(to - flat.ids);
  };
  if (is_nothing) {
    run([](std::size_t) { return Vocabulary::UNKNOWN_ROW; });
    return true;
  }
  const auto read_text = [&](auto texts) {
    if (vocabulary_)
      run([&](std::size_t i) { return vocabulary_->row(texts[i]); });
    else
      run([&](std::size_t i) { return id_of(texts[i]); });
  };
  if (vocabulary_ && !vocabulary_->knows(format)) return false;
  if (is_text(format)) {
    if (!vocabulary_ && !salt_) return false;
    if (format == "u")
      read_text(Texts<std::int32_t>(leaf));
    else
      read_text(Texts<std::int64_t>(leaf));
    return true;
  }
  return with_integers(format, [&]<typename Integer>(const Integer*) {
    const auto* values = elements<Integer>(leaf);
    const auto bits = [=](std::size_t i) { return static_cast<std::uint64_t>(static_cast<std::int64_t>(values[i])); };
    if (vocabulary_)
      run([&](std::size_t i) {
        // Unsigned integers of fewer bits are equal as signed ones of 64.
        constexpr bool is_signed = std::is_signed_v<Integer> || sizeof(Integer) < 8;
        return vocabulary_->row(bits(i), is_signed);
      });
    else if (sizeof(Integer) == 8 && !samples.are_lists() && !drops) {
      flat.ids = reinterpret_cast<const std::int64_t*>(values) + leaf.offset;
      flat.count = samples.count();
    } else
      run([&](std::size_t i) { return static_cast<std::int64_t>(bits(i)); });
  });
}

// A column of text, one value for each sample, whose rows have 32 bits. Some values at a time go all the way while they
// are in the first cache.
template <typename Offset>
EncodedIds IdEncoder::hashed_texts(const ArrowArray& column) const {
  constexpr std::size_t AT_ONCE = 512;
  const Texts<Offset> texts(column);
  const Nulls null(column);
  const auto count = static_cast<std::size_t>(column.length), first = static_cast<std::size_t>(column.offset);
  EncodedIds found;
  found.narrow = buffer<std::int32_t>(count);
  std::int32_t* const narrow = found.narrow->data();
  std::int64_t* offsets = nullptr;
  if (!null.none()) {
    found.offset_count = count + 1;
    found.offsets = buffer<std::int64_t>(count + 1);
    offsets = found.offsets->data();
    *offsets++ = 0;
  }
  std::array<std::int64_t, AT_ONCE> ids, rows;
  for (std::size_t begin = 0; begin < count; begin += AT_ONCE) {
    const std::size_t end = std::min(count, begin + AT_ONCE);
    std::size_t kept = 0;
    if (texts.have_8_bytes(first + begin, first + end, null)) {
      const Offset at = texts.begin(first + begin);
      kept = static_cast<std::size_t>(texts.begin(first + end) - at) / 8;
      if (offsets != nullptr)
        for (std::size_t i = begin; i < end; i++)
          offsets[i] = static_cast<std::int64_t>(found.count) + (texts.begin(first + i + 1) - at) / 8;
      id_kernels().sigrid_hash_of_8(texts.bytes() + at, rows.data(), kept, *salt_, rows_);
    } else {
      // Without branches: a null has a value, too, which the next one replaces.
      for (std::size_t i = begin; i < end; i++) {
        ids[kept] = id_of(texts[first + i]);
        kept += static_cast<std::size_t>(!null(first + i));
        if (offsets != nullptr) offsets[i] = static_cast<std::int64_t>(found.count + kept);
      }
      id_kernels().sigrid_hash(ids.data(), rows.data(), kept, *salt_, rows_);
    }
    for (std::size_t i = 0; i < kept; i++) narrow[found.count + i] = static_cast<std::int32_t>(rows[i]);
    found.count += kept;
  }
  return found;
}

std::optional<EncodedIds> IdEncoder::encode(std::string_view format, std::string_view leaf_format,
                                            const ArrowArray& column) const {
  const bool is_small = rows_ <= std::numeric_limits<std::int32_t>::max();
  if (is_text(format) && !vocabulary_ && salt_ && hashes_ && is_small && !first_)
    return format == "u" ? hashed_texts<std::int32_t>(column) : hashed_texts<std::int64_t>(column);
  Flat flat{.samples = Samples(format, column), .ids = nullptr, .own = {}, .count = 0, .offsets = {}};
  const bool are_lists = flat.samples.are_lists();
  if (!read(are_lists ? leaf_format : format, are_lists ? *column.children[0] : column, flat)) return std::nullopt;
  const bool is_any = salt_ && !hashes_;
  if (salt_ && hashes_) {
    auto hashed = buffer<std::int64_t>(flat.count);
    id_kernels().sigrid_hash(flat.ids, hashed->data(), flat.count, *salt_, rows_);
    flat.own = std::move(hashed);
    flat.ids = flat.own->data();
  }
  const bool is_narrow = !is_any && is_small;
  // An id that is not used has to be allowed, too.
  if ((first_ || !is_narrow) && !vocabulary_ && !is_any && !are_inside(flat.ids, flat.count, rows_))
    return std::nullopt;
  EncodedIds found;
  if (flat.offsets) {
    std::int64_t* offsets = flat.offsets->data();
    found.offset_count = flat.samples.count() + 1;
    if (first_) {
      // Lists have ids of their own.
      std::int64_t *ids = flat.own->data(), kept = 0, begin = 0;
      for (std::size_t sample = 0; sample < flat.samples.count(); sample++) {
        const std::int64_t end = offsets[sample + 1], used = std::min(end - begin, *first_);
        std::copy_n(ids + begin, used, ids + kept);
        kept += used;
        offsets[sample + 1] = kept;
        begin = end;
      }
      flat.count = static_cast<std::size_t>(kept);
    }
    found.offsets = std::move(flat.offsets);
  }
  found.count = flat.count;
  if (!is_narrow) {
    if (!flat.own) {
      flat.own = buffer<std::int64_t>(flat.count);
      std::copy_n(flat.ids, flat.count, flat.own->data());
    }
    found.wide = std::move(flat.own);
    return found;
  }
  found.narrow = buffer<std::int32_t>(found.count);
  if (!narrow(flat.ids, found.count, rows_, found.narrow->data())) return std::nullopt;
  return found;
}

}  // namespace sennit::offload
