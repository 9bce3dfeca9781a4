// SPDX-License-Identifier: Apache-2.0
// The fold kernels of one instruction set. CMake compiles this file once for each set and names it by
// SENNIT_FOLD_VARIANT. The kernels are plain loops that the compiler vectorises, over blocks that stay in the L1 cache.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "reduce/fold.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sennit::SENNIT_FOLD_VARIANT {
namespace {

// IEEE 754 binary16 to binary32 and back, round to nearest even.
struct Half {
  uint16_t bits;
  using Accumulator = float;
  static float widen(Half value) {
#if defined(__F16C__)
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(value.bits)));
#elif defined(__aarch64__)
    return std::bit_cast<__fp16>(value.bits);
#else
    const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    const uint32_t magnitude = value.bits & 0x7FFFu;
    if (magnitude >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13));
    if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude + 0x1C000u) << 13));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
#endif
  }
  static Half narrow(float value) {
#if defined(__F16C__)
    return {static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT)))};
#elif defined(__aarch64__)
    return {std::bit_cast<uint16_t>(static_cast<__fp16>(value))};
#else
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu))};
    if (magnitude >= 0x477FF000u) return {static_cast<uint16_t>(sign | 0x7C00u)};
    if (magnitude < 0x38800000u) {
      // For a subnormal result, adding 0.5 shifts the mantissa so that the hardware rounds for us.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u))};
    }
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u;
    return {static_cast<uint16_t>(sign | (rounded >> 13))};
#endif
  }
};

// bfloat16: the upper half of a binary32, round to nearest even, NaN stays NaN.
struct BFloat {
  uint16_t bits;
  using Accumulator = float;
  static float widen(BFloat value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }
  static BFloat narrow(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
  }
};

struct Bool {
  uint8_t bits;
  using Accumulator = uint8_t;
  static uint8_t widen(Bool value) { return value.bits != 0; }
  static Bool narrow(uint8_t value) { return {value}; }
};

template <class Real>
struct Complex {
  Real re, im;
};

// Element<T>: the stored type, the type of sums, and the conversions between them.
template <class T>
struct Element {
  using Accumulator = T;
  static T widen(T value) { return value; }
  static T narrow(T value) { return value; }
};
template <class T>
requires requires { typename T::Accumulator; }
struct Element<T> : T {};
template <>
struct Element<Complex<Half>> {
  using Accumulator = Complex<float>;
  static Complex<float> widen(Complex<Half> value) { return {Half::widen(value.re), Half::widen(value.im)}; }
  static Complex<Half> narrow(Complex<float> value) { return {Half::narrow(value.re), Half::narrow(value.im)}; }
};

template <class A>
inline constexpr bool is_complex = false;
template <class R>
inline constexpr bool is_complex<Complex<R>> = true;

// Signed overflow wraps as in NumPy and torch, so the result is computed unsigned.
template <class A>
using Wrapping = std::make_unsigned_t<A>;

// A product that is rounded before its use. GCC 12 makes VFMADDSUB of complex products in spite of -ffp-contract=off,
// and the results then differ from the definition in their last bit.
template <class Real>
Real rounded(Real product) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(product);
#endif
#endif
  return product;
}

struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (is_complex<A>)
      return {a.re + b.re, a.im + b.im};
    else if constexpr (std::is_integral_v<A>)
      return static_cast<A>(static_cast<Wrapping<A>>(a) + static_cast<Wrapping<A>>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (is_complex<A>)
      return {rounded(a.re * b.re) - rounded(a.im * b.im), rounded(a.re * b.im) + rounded(a.im * b.re)};
    else if constexpr (std::is_integral_v<A>)
      // Computed in 64 bits: 16-bit operands would promote to a signed int and overflow it.
      return static_cast<A>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    else
      return a * b;
  }
};
struct Min {  // NaN wins, as in torch.minimum
  template <class A>
  static A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};
struct And {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};
struct Or {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct Xor {
  template <class A>
  static A apply(A a, A b) {
    return static_cast<A>(a ^ b);
  }
};

template <class A>
A scaled(A value, double factor) {
  if constexpr (is_complex<A>)
    return {value.re * static_cast<decltype(value.re)>(factor), value.im * static_cast<decltype(value.re)>(factor)};
  else if constexpr (std::is_integral_v<A>)
    return static_cast<A>(static_cast<uint64_t>(value) * static_cast<uint64_t>(static_cast<int64_t>(factor)));
  else
    return value * static_cast<A>(factor);
}

template <class A>
A divided(A value, uint32_t divisor) {
  if constexpr (is_complex<A>) {
    using Real = decltype(value.re);
    return {value.re / static_cast<Real>(divisor), value.im / static_cast<Real>(divisor)};
  } else if constexpr (std::is_integral_v<A>) {
    // Truncates toward zero. 128 bits hold any value at any world size.
    return static_cast<A>(static_cast<__int128>(value) / static_cast<__int128>(divisor));
  } else {
    return value / static_cast<A>(divisor);
  }
}

enum class Finish { none, divide };
enum class Prepare { none, scale };

// One operand as accumulators: what a rank gave, or a partial sum.
template <class T, Prepare prepare>
struct Leaf {
  using A = typename Element<T>::Accumulator;
  const T* data;
  double factor;
  A operator[](uint64_t i) const {
    const A wide = Element<T>::widen(data[i]);
    if constexpr (prepare == Prepare::scale) return scaled(wide, factor);
    return wide;
  }
};
template <class A>
struct Partial {
  const A* data;
  A operator[](uint64_t i) const { return data[i]; }
};

// Accumulators as the result.
template <class T, Finish finish>
struct Final {
  T* data;
  uint32_t divisor;
  void put(uint64_t i, typename Element<T>::Accumulator value) const {
    if constexpr (finish == Finish::divide) value = divided(value, divisor);
    data[i] = Element<T>::narrow(value);
  }
};
template <class A>
struct Unfinished {
  A* data;
  void put(uint64_t i, A value) const { data[i] = value; }
};

// 4 KiB of accumulators: those of a deep program fit the first-level cache beside one block of a source.
template <class A>
inline constexpr uint64_t BLOCK = 4'096 / sizeof(A);

// Folds up to four operands in one pass. The destination may be one of the sources: reads and writes meet only at the
// same index, so the loops carry no dependence (ivdep), and the compiler need not test for overlap.
// Vectorising a loop takes the compiler long, and a call costs a loop nothing: so each is compiled once, for all.
template <class Source, class Result>
[[gnu::noinline]] void fold_one(const Source a, const Result result, uint64_t count) {
#pragma GCC ivdep
  for (uint64_t i = 0; i < count; ++i) result.put(i, a[i]);
}
template <class Op, class Left, class Right, class Result>
[[gnu::noinline]] void fold_two(const Left a, const Right b, const Result result, uint64_t count) {
#pragma GCC ivdep
  for (uint64_t i = 0; i < count; ++i) result.put(i, Op::apply(a[i], b[i]));
}
template <class Op, class Source, class Result>
[[gnu::noinline]] void fold_three(const Source a, const Source b, const Source c, const Result result, uint64_t count) {
#pragma GCC ivdep
  for (uint64_t i = 0; i < count; ++i) result.put(i, Op::apply(Op::apply(a[i], b[i]), c[i]));
}
template <class Op, class Source, class Result>
[[gnu::noinline]] void fold_four(const Source a, const Source b, const Source c, const Source d, const Result result,
                                 uint64_t count) {
#pragma GCC ivdep
  for (uint64_t i = 0; i < count; ++i) result.put(i, Op::apply(Op::apply(a[i], b[i]), Op::apply(c[i], d[i])));
}

template <class T, class Op, Prepare prepare, Finish finish>
class Folder {
  using A = typename Element<T>::Accumulator;
  // Whether a partial sum reads like an operand, and a result that is one is written like any other.
  static constexpr bool SAME_FORM = std::is_same_v<T, A> || std::is_same_v<T, Bool>;
  static constexpr bool READS_ALIKE = SAME_FORM && prepare == Prepare::none;
  static constexpr bool WRITES_ALIKE = SAME_FORM && finish == Finish::none;
  // Where a type is its own accumulator, an operand is a partial sum, and the same loop reads or writes both.
  static constexpr bool IS_ONE_TYPE = std::is_same_v<T, A>;
  using Operand = std::conditional_t<IS_ONE_TYPE && READS_ALIKE, Partial<A>, Leaf<T, prepare>>;
  using Answer = std::conditional_t<IS_ONE_TYPE && WRITES_ALIKE, Unfinished<A>, Final<T, finish>>;

 public:
  explicit Folder(const FoldArguments& arguments) : arguments_(arguments), sources_(arguments.sources) {}

  void run() {
    if (sources_.size() <= 4 && run_in_one_pass()) return;
    for (uint64_t start = 0; start < arguments_.count; start += BLOCK<A>) {
      const uint64_t length = std::min(BLOCK<A>, arguments_.count - start);
      run_program(start, length);
      with_result(start, [&](auto result) { fold_one(Partial<A>{stack_[0]}, result, length); });
    }
  }

 private:
  template <class Body>
  void with_source(const FoldSource& source, uint64_t start, Body body) const {
    if constexpr (!READS_ALIKE) {
      if (source.is_partial) return body(Partial<A>{static_cast<const A*>(source.data) + start});
    }
    body(operand(source, start));
  }

  Operand operand(const FoldSource& source, uint64_t start) const {
    const T* data = static_cast<const T*>(source.data) + start;
    if constexpr (std::is_same_v<Operand, Partial<A>>)
      return {data};
    else
      return {data, arguments_.scalar};
  }

  template <class Body>
  void with_result(uint64_t start, Body body) const {
    if constexpr (!WRITES_ALIKE) {
      if (arguments_.gives_partial) return body(Unfinished<A>{static_cast<A*>(arguments_.destination) + start});
    }
    T* data = static_cast<T*>(arguments_.destination) + start;
    if constexpr (std::is_same_v<Answer, Unfinished<A>>)
      body(Answer{data});
    else
      body(Answer{data, arguments_.divisor});
  }

  // The canonical trees of up to four leaves, and of two partial sums.
  bool run_in_one_pass() const {
    const auto source = [this](size_t index) { return operand(sources_[index], 0); };
    const auto is_partial = [](const FoldSource& given) { return given.is_partial; };
    const bool are_leaves = READS_ALIKE || std::none_of(sources_.begin(), sources_.end(), is_partial);
    if (sources_.size() > 2 && sources_[1].combinations != 1) return false;
    if (sources_.size() > 3 && sources_[2].combinations != 0) return false;
    if (are_leaves) {
      with_result(0, [&](auto result) {
        const uint64_t count = arguments_.count;
        if (sources_.size() == 1) fold_one(source(0), result, count);
        if (sources_.size() == 2) fold_two<Op>(source(0), source(1), result, count);
        if (sources_.size() == 3) fold_three<Op>(source(0), source(1), source(2), result, count);
        if (sources_.size() == 4) fold_four<Op>(source(0), source(1), source(2), source(3), result, count);
      });
      return true;
    }
    if (sources_.size() != 2 || !sources_[0].is_partial || !sources_[1].is_partial) return false;
    const auto partial = [this](size_t index) { return Partial<A>{static_cast<const A*>(sources_[index].data)}; };
    with_result(0, [&](auto result) { fold_two<Op>(partial(0), partial(1), result, arguments_.count); });
    return true;
  }

  // Leaves the value of `length` elements in stack_[0]. An operand that nothing follows is kept until it is known
  // whether it meets the next operand, so that a pair of leaves is read and combined in one pass.
  void run_program(uint64_t start, uint64_t length) {
    const FoldSource* kept = nullptr;
    uint32_t depth = 0;
    const auto push = [&](const FoldSource& source) {
      with_source(source, start, [&](auto from) { fold_one(from, Unfinished<A>{stack_[depth]}, length); });
      ++depth;
    };
    for (const FoldSource& source : sources_) {
      uint32_t combinations = source.combinations;
      if (kept != nullptr && (combinations == 0 || kept->is_partial != source.is_partial)) {
        push(*kept);
        kept = nullptr;
      }
      if (combinations == 0) {
        kept = &source;
        continue;
      }
      if (kept != nullptr) {
        combine_pair(stack_[depth++], *kept, source, start, length);
        kept = nullptr;
      } else {
        A* top = stack_[depth - 1];
        with_source(source, start, [&](auto from) { combine(top, from, length); });
      }
      for (; --combinations != 0; --depth) combine(stack_[depth - 2], Partial<A>{stack_[depth - 1]}, length);
    }
    if (kept != nullptr) push(*kept);
  }

  void combine_pair(A* to, const FoldSource& left, const FoldSource& right, uint64_t start, uint64_t length) const {
    with_source(left, start, [&](auto a) {
      auto b = a;
      b.data = static_cast<decltype(a.data)>(right.data) + start;
      fold_two<Op>(a, b, Unfinished<A>{to}, length);
    });
  }

  template <class Source>
  static void combine(A* to, Source from, uint64_t length) {
    fold_two<Op>(Partial<A>{to}, from, Unfinished<A>{to}, length);
  }

  const FoldArguments& arguments_;
  const std::span<const FoldSource> sources_;
  alignas(64) A stack_[MAX_FOLD_DEPTH][BLOCK<A>];
};

template <class T, class Op, Prepare prepare, Finish finish>
void fold(const FoldArguments& arguments) {
  Folder<T, Op, prepare, finish>(arguments).run();
}

template <class T, class Op, Prepare prepare = Prepare::none, Finish finish = Finish::none>
constexpr FoldKernel kernel = &fold<T, Op, prepare, finish>;

template <class T>
FoldKernel arithmetic(sennit_reduce reduce) {
  switch (reduce) {
    case SENNIT_SUM:
      return kernel<T, Sum>;
    case SENNIT_AVG:
      return kernel<T, Sum, Prepare::none, Finish::divide>;
    case SENNIT_PRODUCT:
      return kernel<T, Product>;
    case SENNIT_PREMUL_SUM:
      return kernel<T, Sum, Prepare::scale>;
    default:
      return nullptr;
  }
}

template <class T>
FoldKernel ordered(sennit_reduce reduce) {
  switch (reduce) {
    case SENNIT_MIN:
      return kernel<T, Min>;
    case SENNIT_MAX:
      return kernel<T, Max>;
    default:
      return arithmetic<T>(reduce);
  }
}

// Sums, products and operations on bits of two's complement do not ask for the sign: one kernel serves both types.
template <class T>
FoldKernel integer(sennit_reduce reduce) {
  using Bits = Wrapping<T>;
  switch (reduce) {
    case SENNIT_BAND:
      return kernel<Bits, And>;
    case SENNIT_BOR:
      return kernel<Bits, Or>;
    case SENNIT_BXOR:
      return kernel<Bits, Xor>;
    case SENNIT_SUM:
    case SENNIT_PRODUCT:
    case SENNIT_PREMUL_SUM:
      return arithmetic<Bits>(reduce);
    case SENNIT_AVG:
      return kernel<T, Sum, Prepare::none, Finish::divide>;
    case SENNIT_MIN:
      return kernel<T, Min>;
    case SENNIT_MAX:
      return kernel<T, Max>;
  }
  return nullptr;
}

// Truth values: a sum means "any", a product means "all".
FoldKernel logical(sennit_reduce reduce) {
  switch (reduce) {
    case SENNIT_SUM:
    case SENNIT_MAX:
    case SENNIT_BOR:
      return kernel<Bool, Or>;
    case SENNIT_PRODUCT:
    case SENNIT_MIN:
    case SENNIT_BAND:
      return kernel<Bool, And>;
    case SENNIT_BXOR:
      return kernel<Bool, Xor>;
    default:
      return nullptr;
  }
}

}  // namespace

FoldKernel find(sennit_dtype dtype, sennit_reduce reduce) {
  switch (dtype) {
    case SENNIT_U8:
      return integer<uint8_t>(reduce);
    case SENNIT_I8:
      return integer<int8_t>(reduce);
    case SENNIT_I16:
      return integer<int16_t>(reduce);
    case SENNIT_U16:
      return integer<uint16_t>(reduce);
    case SENNIT_I32:
      return integer<int32_t>(reduce);
    case SENNIT_U32:
      return integer<uint32_t>(reduce);
    case SENNIT_I64:
      return integer<int64_t>(reduce);
    case SENNIT_U64:
      return integer<uint64_t>(reduce);
    case SENNIT_F16:
      return ordered<Half>(reduce);
    case SENNIT_BF16:
      return ordered<BFloat>(reduce);
    case SENNIT_F32:
      return ordered<float>(reduce);
    case SENNIT_F64:
      return ordered<double>(reduce);
    case SENNIT_C32:
      return arithmetic<Complex<Half>>(reduce);
    case SENNIT_C64:
      return arithmetic<Complex<float>>(reduce);
    case SENNIT_C128:
      return arithmetic<Complex<double>>(reduce);
    case SENNIT_BOOL:
      return logical(reduce);
  }
  return nullptr;
}

}  // namespace sennit::SENNIT_FOLD_VARIANT
