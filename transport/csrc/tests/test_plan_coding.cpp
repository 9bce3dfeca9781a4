// SPDX-License-Identifier: Apache-2.0
// Encode and decode steps: the rules of plans that have them, and long ones, which run in pieces.
#include <random>

#include "codec/codec.hpp"
#include "engine_group.hpp"
#include "executor/plan_coding.hpp"

using namespace sennit;
using namespace sennit::test;

namespace {

// As transport/plans/signature.py: coded, and which codec.
uint64_t signature(CodecKind kind, uint32_t block, bool stochastic) {
  return uint64_t{1} << 56 | uint64_t{1} << 44 | static_cast<uint64_t>(kind) | uint64_t{stochastic} << 3 |
         (block & 0xFFF) << 4;
}

struct Coded {
  CodecKind kind = CodecKind::int8;
  uint32_t block = 64;
  bool stochastic = false;
  uint64_t count = 100;
  uint64_t first_index = 0;

  CodecSpec spec(uint64_t seed) const { return {kind, block, stochastic, seed}; }
  uint64_t bytes() const { return coded_bytes(spec(0), SENNIT_F32, count); }
  // From buffer 0 to codes in buffer 1, and from there to buffer 2.
  PlanWriter plan() const {
    PlanWriter writer(1, 0, 3, signature(kind, block, stochastic));
    const uint32_t encode =
        writer.add(StepKind::encode, 0, block, 1, 0, count * 4, {Operand{}, Operand{.kind = 2, .offset = first_index}},
                   stochastic ? STEP_STOCHASTIC : 0);
    const uint32_t decode = writer.add(StepKind::decode, 0, block, 2, 0, count * 4, {Operand{.index = 1}});
    writer.step(encode).reduce = writer.step(decode).reduce = static_cast<uint8_t>(kind);
    writer.edge(encode, decode);
    return writer;
  }
};

constexpr CodecSpec LOSSLESS{CodecKind::lossless, 0, false, 0};

// Rank 0 of two: takes a length and lossless codes from rank 1, and decodes them to buffer 0.
PlanWriter lossless_receiver(uint64_t count) {
  PlanWriter writer(2, 0, 1, signature(CodecKind::lossless, 0, false));
  const uint64_t most = coded_bytes(LOSSLESS, SENNIT_F32, count);
  writer.uses_scratch(LENGTH_BYTES + most);
  const uint32_t length = writer.add(StepKind::receive, 1, 1, 1, 0, LENGTH_BYTES);
  const uint32_t codes = writer.add(StepKind::receive, 1, 0, 1, LENGTH_BYTES, most, {}, STEP_SIZED);
  const uint32_t decode =
      writer.add(StepKind::decode, 1, 0, 0, 0, count * 4, {Operand{.index = 1, .offset = LENGTH_BYTES}});
  writer.step(decode).reduce = static_cast<uint8_t>(CodecKind::lossless);
  writer.edge(length, codes);
  writer.edge(codes, decode);
  return writer;
}

Result post(Engine& engine, const LoadedPlan& plan, void* data, uint64_t size_bytes) {
  const sennit_buffer buffer{data, size_bytes};
  const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, 0};
  sennit_op* op = nullptr;
  char error[1024] = "";
  Result result;
  auto* const comm = reinterpret_cast<sennit_comm*>(&engine);
  result.status = sennit_post(comm, plan.handle, &buffer, 1, &options, &op, error, sizeof error);
  result.error = error;
  if (result.status != SENNIT_OK) return result;
  result.status = sennit_wait(op, 0);
  result.error = sennit_op_error(op);
  sennit_op_release(op);
  return result;
}

// Rank 1 sends any length and any bytes to a rank 0 that expects codes. Returns what rank 0 got.
Result receive_codes(Route::Kind kind, uint64_t length, const std::vector<std::byte>& codes,
                     std::vector<float>& decoded) {
  const Group group(2, 60'000'000, kind);
  std::vector<std::byte> sent(LENGTH_BYTES);
  std::memcpy(sent.data(), &length, LENGTH_BYTES);
  sent.insert(sent.end(), codes.begin(), codes.end());
  std::thread sender([&] {
    PlanWriter writer(2, 1, 1, signature(CodecKind::lossless, 0, false));
    writer.add(StepKind::send, 0, 1, 0, 0, LENGTH_BYTES, {Operand{}});
    writer.add(StepKind::send, 0, 0, 0, 0, codes.size(), {Operand{.offset = LENGTH_BYTES}});
    post(*group.engines[1], LoadedPlan(writer.bytes()), sent.data(), sent.size());
  });
  const Result result = post(*group.engines[0], LoadedPlan(lossless_receiver(decoded.size()).bytes()), decoded.data(),
                             decoded.size() * 4);
  sender.join();
  return result;
}

bool says(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

std::string changed(const std::function<void(Step& encode, Step& decode)>& change) {
  PlanWriter writer = Coded{}.plan();
  change(writer.step(0), writer.step(1));
  return refusal(writer);
}

}  // namespace

TEST_CASE("a long step runs in pieces, and gives the bits of the whole") {
  std::mt19937_64 random(7);
  const uint64_t seed = 0x1234'5678'9ABC'DEF0;
  for (const Coded coded :
       {Coded{CodecKind::int8, 100, true, 1'000'003, 5}, Coded{CodecKind::fp16, 0, true, 300'001, 1},
        Coded{CodecKind::fp8_e5m2, 33, false, 500'009, 0}, Coded{CodecKind::mx4, 32, true, 400'001, 8},
        Coded{CodecKind::bf16, 0, false, 65'536, 0},
        Coded{CodecKind::fp8_e4m3, 4'096, true, 4'095, uint64_t{1} << 63}}) {
    std::vector<float> values(coded.count), decoded(coded.count), expected_values(coded.count);
    for (float& value : values) value = static_cast<float>(random() % 20'001) / 777.0f - 12.0f;
    std::vector<std::byte> expected(coded.bytes()), codes(coded.bytes());
    encode(coded.spec(seed), SENNIT_F32, values.data(), coded.count, coded.first_index, expected);
    REQUIRE(decode(coded.spec(seed), SENNIT_F32, expected, coded.count, SENNIT_F32, expected_values.data()));
    const LoadedPlan plan(coded.plan().bytes());
    run_ranks(1, 60'000'000, [&](Engine& engine, uint32_t) {
      const sennit_buffer buffers[] = {
          {values.data(), coded.count * 4}, {codes.data(), codes.size()}, {decoded.data(), coded.count * 4}};
      const sennit_post_options options{0, 0, 0, 1.0, nullptr, 0, seed};
      sennit_op* op = nullptr;
      char error[512] = "";
      auto* comm = reinterpret_cast<sennit_comm*>(&engine);
      REQUIRE(sennit_post(comm, plan.handle, buffers, 3, &options, &op, error, sizeof error) == SENNIT_OK);
      CHECK(sennit_wait(op, 0) == SENNIT_OK);
      sennit_op_release(op);
    });
    CHECK(codes == expected);
    CHECK(std::memcmp(decoded.data(), expected_values.data(), coded.count * 4) == 0);
  }
}

TEST_CASE("sizes are those of the codec") {
  const std::vector<std::byte> bytes = Coded{}.plan().bytes();
  CHECK(Plan::decode(bytes.data(), bytes.size())->sizes_of({})->buffer_extents ==
        std::vector<uint64_t>{400, 108, 400, 0});
  CHECK(refusal(Coded{.count = 0}.plan()).empty());
}

TEST_CASE("malformed codecs are refused") {
  CHECK(says(refusal(Coded{CodecKind::lossless, 0}.plan()), "lossless outside of scratch"));
  CHECK(says(refusal(Coded{CodecKind::mx4, 64}.plan()), "block 64 of mx4; allowed: 32"));
  CHECK(says(refusal(Coded{CodecKind::int8, 4'097}.plan()), "block 4097; allowed: 1 to 4096"));
  CHECK(says(changed([](Step& step, Step&) { step.reduce = 9; }), "codec number 9"));
  CHECK(says(changed([](Step& step, Step&) { step.dtype = SENNIT_I32; }), "element type 3; allowed: F32, F16, BF16"));
  CHECK(says(changed([](Step& step, Step&) { step.dtype = 200; }), "element type 200"));
  CHECK(says(changed([](Step& step, Step&) { step.size_bytes = 398; }), "part of an element"));
  CHECK(says(changed([](Step& step, Step&) { step.size_bytes = uint64_t{1} << 50; }), "allowed: 0..281474976710656"));
  CHECK(says(changed([](Step& step, Step&) { step.flags = 32; }), "unknown flags in 32"));
  CHECK(says(changed([](Step&, Step& step) { step.flags = STEP_LOAN; }), "unknown flags in 1"));
  CHECK(says(changed([](Step& step, Step&) { step.flags = STEP_STOCHASTIC; }), "signature does not name"));
  CHECK(says(changed([](Step&, Step& step) { step.slot = 32; }), "signature does not name"));
  CHECK(says(changed([](Step& step, Step&) { step.operand_count = 1; }), "the index of the first one as operands"));
  CHECK(says(changed([](Step&, Step& step) { step.operand_count = 0; }), "must have one operand"));
  CHECK(says(changed([](Step&, Step& step) { step.destination_offset = 2; }), "multiple of their size"));
  CHECK(says(changed([](Step& step, Step&) { step.destination_buffer = 0; }), "writes over what it reads"));
  CHECK(says(changed([](Step&, Step& step) { step.destination_buffer = 9; }), "names buffer 9"));
  CHECK(says(changed([](Step&, Step& step) { step.destination_offset = PlanWriter::counted(0, 0); }), "fixed size"));
}

TEST_CASE("a codec between hosts alone is the one that the signature names, too") {
  constexpr uint64_t BETWEEN_HOSTS = uint64_t{1} << 47;
  const auto with = [](uint64_t named) {
    PlanWriter writer(1, 0, 2, named);
    const uint32_t encode = writer.add(StepKind::encode, 0, 64, 1, 0, 400, {Operand{}, Operand{.kind = 2}});
    writer.step(encode).reduce = static_cast<uint8_t>(CodecKind::int8);
    return refusal(writer);
  };
  CHECK(with(signature(CodecKind::int8, 64, false) | BETWEEN_HOSTS).empty());
  CHECK(says(with(signature(CodecKind::int8, 32, false) | BETWEEN_HOSTS), "signature does not name"));
  CHECK(says(with(uint64_t{1} << 56 | BETWEEN_HOSTS), "signature does not name"));
}

TEST_CASE("messages and codes without fixed size have their lengths in scratch") {
  const auto with = [](const std::function<void(Step & message, Step & decode)>& change) {
    PlanWriter writer = lossless_receiver(100);
    change(writer.step(1), writer.step(2));
    return refusal(writer);
  };
  CHECK(with([](Step&, Step&) {}).empty());
  CHECK(says(with([](Step& step, Step&) { step.destination_buffer = 0; }), "a length outside of scratch"));
  CHECK(says(with([](Step& step, Step&) { step.destination_offset = 7; }), "no place for a length"));
  CHECK(says(with([](Step& step, Step&) { step.flags |= STEP_LOAN; }), "only a plain message"));
  CHECK(says(with([](Step&, Step& step) { step.flags = STEP_SIZED; }), "only a plain message"));
  CHECK(says(with([](Step&, Step& step) { step.peer = 2; }), "decodes what rank 2 coded"));
  CHECK(says(with([](Step& step, Step&) { step.size_bytes += 1; }), "reaches beyond the scratch"));
}

// What a peer may send in place of codes: its length, and the message.
TEST_CASE("lossless codes that lie about their size or content end the group, and their sender is named") {
  for (const Route::Kind kind : {Route::Kind::shm, Route::Kind::udp}) {
    for (const uint64_t count : {uint64_t{100}, uint64_t{300'000}}) {
      const uint64_t most = coded_bytes(LOSSLESS, SENNIT_F32, count);
      std::vector<float> values(count + 8'192);
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1'000) / 7.0f;
      const auto codes_of = [&](uint64_t elements) {
        std::vector<std::byte> codes(coded_bytes(LOSSLESS, SENNIT_F32, elements));
        codes.resize(encode(LOSSLESS, SENNIT_F32, values.data(), elements, 0, codes));
        return codes;
      };
      const std::vector<std::byte> good = codes_of(count);
      const auto told = [&](uint64_t length, const std::vector<std::byte>& codes) {
        std::vector<float> decoded(count);
        const Result result = receive_codes(kind, length, codes, decoded);
        if (result.status == SENNIT_OK) CHECK(std::memcmp(decoded.data(), values.data(), count * 4) == 0);
        return result.error;
      };
      const auto is_refused = [&](const std::vector<std::byte>& codes) {
        const std::string text = told(codes.size(), codes);
        return codes.size() > most ? says(text, "rank 1 says that its codes have")
                                   : says(text, "rank 1 sent") && says(text, "no lossless codes");
      };
      CHECK(told(good.size(), good).empty());
      CHECK(says(told(most + 1, good), "rank 1 says that its codes have"));
      CHECK(says(told(UINT64_MAX, good), "rank 1 says that its codes have"));
      CHECK(says(told(good.size() - 1, good), "rank 1"));
      std::vector<std::byte> wrong = good;
      wrong.pop_back();
      CHECK(is_refused(wrong));
      CHECK(is_refused({}));
      wrong = good;
      wrong.push_back(std::byte{0});
      CHECK(is_refused(wrong));
      wrong = good;
      wrong[0] = std::byte{3};
      CHECK(is_refused(wrong));
      CHECK(is_refused(codes_of(count - 1)));
      if (const std::vector<std::byte> longer = codes_of(count + 8'192); longer.size() <= most)
        CHECK(is_refused(longer));
    }
  }
}

TEST_CASE("a loan that is decoded must be as long as its codes") {
  const auto reads = [](uint64_t loan_bytes) {
    PlanWriter writer(2, 0, 1, signature(CodecKind::int8, 64, false));
    const uint32_t loan = writer.add(StepKind::receive, 1, 0, 0, 0, loan_bytes, {}, STEP_LOAN);
    const uint32_t decode = writer.add(StepKind::decode, 0, 64, 0, 0, 400, {Operand{.kind = 1, .index = loan}});
    writer.step(decode).reduce = static_cast<uint8_t>(CodecKind::int8);
    writer.edge(loan, decode);
    return refusal(writer);
  };
  CHECK(reads(108).empty());
  CHECK(says(reads(107), "reads beyond a loan"));
}
