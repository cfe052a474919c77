#include "wgmma.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

namespace emulation {
namespace {

using Table = std::array<float, 65536>;
template <class T>
const Table& table() {
  static const Table values = [] {
    Table t;
    for (int i = 0; i < 65536; ++i) t[i] = static_cast<float>(__builtin_bit_cast(T, static_cast<uint16_t>(i)));
    return t;
  }();
  return values;
}

// Element (row, k) of an operand with 128-byte swizzle, where row is one of m or n.
struct Operand {
  uint32_t address, leading, stride;
  bool transposed;
  int bytes;  // of an element
  Operand(uint64_t descriptor, bool transposed, int bytes)
      : address((descriptor & 0x3FFF) << 4),
        leading((descriptor >> 16 & 0x3FFF) << 4),
        stride((descriptor >> 32 & 0x3FFF) << 4),
        transposed(transposed),
        bytes(bytes) {
    check(descriptor >> 62 == 1 && (descriptor >> 49 & 7) == 0, "a matrix descriptor is not of the 128-byte swizzle");
  }
  uint32_t at(int row, int k) const {
    return swizzled(transposed ? address + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2 : address + row / 8 * stride + row % 8 * 128 + k * bytes);
  }
};

void load_operand(uint64_t descriptor, bool transposed, bool bf16, int rows, float* to /* [16][rows] */) {
  const Table& values = bf16 ? table<__nv_bfloat16>() : table<__half>();
  const Operand operand(descriptor, transposed, 2);
  for (int k = 0; k < 16; ++k)
    for (int row = 0; row < rows; ++row) {
      uint16_t bits;
      std::memcpy(&bits, shared_pointer(operand.at(row, k), 2), 2);
      to[k * rows + row] = values[bits];
    }
}

// Thread t = 32 w + l holds, in accumulator[4c .. 4c+3], row 16w + l/4 (first two) and 8 below it of columns 8c + 2(l%4) and the next.
template <class Visit>
void each_accumulator(int columns, Visit visit) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < columns / 2; ++i) visit(t, i, t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, i / 4 * 8 + t % 4 * 2 + i % 2);
}

// An e4m3 value: significand * 2^(exponent - 3).
struct Factor {
  int significand, exponent;
};
constexpr int kNotANumber = 16;  // a significand that no number has

Factor factor_of(uint8_t byte) {
  const int exponent = byte >> 3 & 15, fraction = byte & 7;
  if ((byte & 127) == 127) return {kNotANumber, -6};
  const int significand = exponent ? 8 + fraction : fraction;
  return {byte >> 7 ? -significand : significand, exponent ? exponent - 7 : -6};
}

constexpr int kDepth8 = 32;  // of a product of e4m3

// [rows][32]
void load_factors(uint64_t descriptor, int rows, Factor (*to)[kDepth8]) {
  const Operand operand(descriptor, false, 1);
  for (int row = 0; row < rows; ++row)
    for (int k = 0; k < kDepth8; ++k) to[row][k] = factor_of(*shared_pointer(operand.at(row, k), 1));
}

// What the tensor cores of Hopper make of 32 products and an accumulator (arXiv 2511.10909): all are aligned to the largest exponent, of
// which 13 fraction bits are kept. What is behind them is cut off, and so it is of the sum.
float sum_of_products(const Factor* a, const Factor* b, float c) {
  constexpr int kFraction = 13, kNothing = -1000;
  const uint32_t bits = __builtin_bit_cast(uint32_t, c);
  const int of_c = static_cast<int>(bits >> 23 & 255) - 127;
  int largest = c == 0.f ? kNothing : of_c;
  for (int k = 0; k < kDepth8; ++k) {
    if (a[k].significand == kNotANumber || b[k].significand == kNotANumber) return std::numeric_limits<float>::quiet_NaN();
    if (a[k].significand && b[k].significand) largest = std::max(largest, a[k].exponent + b[k].exponent);
  }
  if (of_c == 128) return c;
  if (largest == kNothing) return 0.f;
  const auto aligned = [&](int64_t significand, int exponent, int fraction) {  // of significand * 2^(exponent - fraction)
    const int shift = std::min(62, largest - exponent + fraction - kFraction);
    const int64_t size = significand < 0 ? -significand : significand, kept = shift > 0 ? size >> shift : size << -shift;
    return significand < 0 ? -kept : kept;
  };
  int64_t sum = 0;
  if (c != 0.f) sum = aligned((c < 0 ? -1 : 1) * static_cast<int64_t>((bits & 0x7FFFFF) | 0x800000), of_c, 23);
  for (int k = 0; k < kDepth8; ++k) sum += aligned(a[k].significand * b[k].significand, a[k].exponent + b[k].exponent, 6);
  const float exact = std::ldexp(static_cast<float>(sum), largest - kFraction);
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, exact) & ~0x3FFu);
}

void multiply_e4m3(const Product& p, float* const accumulators[128]) {
  static Factor a[64][kDepth8], b[256][kDepth8];
  load_factors(p.a, 64, a);
  load_factors(p.b, p.columns, b);
  each_accumulator(p.columns, [&](int t, int i, int row, int column) {
    accumulators[t][i] = sum_of_products(a[row], b[column], p.accumulate ? accumulators[t][i] : 0.f);
  });
}

// The left operand of a product that has it in registers, [16, 64].
void gather_registers(const uint32_t (*registers)[4], float* to) {
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 2; ++j)
        to[(i / 2 * 8 + t % 4 * 2 + j) * 64 + t / 32 * 16 + t % 32 / 4 + i % 2 * 8] = table<__nv_bfloat16>()[registers[t][i] >> 16 * j & 0xFFFF];
}

void multiply(const Product& p, float* const accumulators[128], const uint32_t (*registers)[4]) {
  if (p.elements == Elements::kE4M3) return multiply_e4m3(p, accumulators);
  static float a[16 * 64], b[16 * 256], sums[64 * 256];
  if (p.a_in_registers) gather_registers(registers, a);
  else load_operand(p.a, p.transpose_a, p.elements == Elements::kBFloat16, 64, a);
  load_operand(p.b, p.transpose_b, p.elements == Elements::kBFloat16, p.columns, b);
  std::memset(sums, 0, sizeof(sums));
  for (int row = 0; row < 64; ++row)
    for (int k = 0; k < 16; ++k) {
      const float x = a[k * 64 + row];
      float* __restrict to = sums + row * 256;
      const float* __restrict from = b + k * p.columns;
      for (int column = 0; column < p.columns; ++column) to[column] += x * from[column];
    }
  each_accumulator(p.columns, [&](int t, int i, int row, int column) {
    accumulators[t][i] = (p.accumulate ? accumulators[t][i] : 0.f) + sums[row * 256 + column];
  });
}

}  // namespace

void wait_for_products(int newest) {
  Block& block = *current->block;
  const int group = current->number / 128;
  meet(block.warpgroups[group], 128, "wgmma.wait_group of its warpgroup", [&] {
    Thread* threads = &block.threads[group * 128];
    check(threads[0].products.open.empty(), "wgmma.wait_group before wgmma.commit_group");
    std::vector<Product> products[128];
    for (int t = 0; t < 128; ++t) threads[t].products.complete_all_but(newest, [&](const Product& p) { products[t].push_back(p); });
    for (size_t i = 0; i < products[0].size(); ++i) {
      float* accumulators[128];
      static uint32_t registers[128][4];
      for (int t = 0; t < 128; ++t) {
        check(products[t].size() == products[0].size() && products[t][i].same(products[0][i]), "threads of a warpgroup issue different products");
        accumulators[t] = products[t][i].accumulator;
        std::memcpy(registers[t], products[t][i].registers, sizeof registers[t]);
      }
      multiply(products[0][i], accumulators, registers);
    }
  });
}

}  // namespace emulation
