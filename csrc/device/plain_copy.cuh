// Operands that the copy engine cannot reach, fetched by ordinary loads into the layout that it would have made of them (operands.cuh).
#pragma once
#include "device/shaped_groups.cuh"

namespace fusible {

// 64 values of a line that runs along the contiguous dimension are 128 bytes of shared memory. K-major: a line is a row of the operand;
// MN-major: a value of k, in blocks of 64 columns.
struct PlainMatrix {
  const uint16_t *begin, *end;  // of the tensor, outside of which nothing is read
  const uint16_t* data;         // of the group
  int pitch, lines, width;      // what the group has: lines, and values of each
  bool k_major;
};

// The `count` values from `from` on, and zeros after them. Reads whole 16 bytes where at least one of their values is asked for and all of
// them are of the tensor.
DEVICE uint4 load_octet(const PlainMatrix& m, const uint16_t* from, int count) {
  if (count <= 0) return {0, 0, 0, 0};
  const uintptr_t address = reinterpret_cast<uintptr_t>(from);
  const int shift = address & 15;
  const auto* low = reinterpret_cast<const uint4*>(address - shift);
  const bool two = shift + 2 * count > 16;
  uint32_t w[8] = {};
  if (reinterpret_cast<const uint16_t*>(low) >= m.begin && reinterpret_cast<const uint16_t*>(low + (two ? 2 : 1)) <= m.end) {
    const uint4 x = __ldg(low);
    uint4 y = {0, 0, 0, 0};
    if (two) y = __ldg(low + 1);
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
    if (shift & 8) {
#pragma unroll
      for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
    }
    if (shift & 4) {
#pragma unroll
      for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
    }
    if (shift & 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = __byte_perm(w[i], w[i + 1], 0x5432);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) w[i / 2] |= static_cast<uint32_t>(__ldg(from + i)) << i % 2 * 16;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = count >= 2 * i + 2 ? w[i] : count > 2 * i ? w[i] & 0xFFFF : 0;
  return {w[0], w[1], w[2], w[3]};
}

// `lines` lines of 64 values to a stage, by number `thread` of kThreads. `first` is the first row or column of the tile, `k` the first value
// of the depth.
template <int kThreads>
DEVICE void copy_plain(const PlainMatrix& m, uint8_t* to, int lines, int first, int k, int thread) {
  constexpr int kAtOnce = 4;  // loads on their way; a block of 64 lines is a multiple of as many
  static_assert(64 * 8 % (kThreads * kAtOnce) == 0);
#pragma unroll 1
  for (int base = thread; base < lines * 8; base += kThreads * kAtOnce) {
    uint4 octets[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int line = (base + u * kThreads) / 8, chunk = (base + u * kThreads) % 8;
      const int down = m.k_major ? first + line : k + line % 64, across = m.k_major ? k + chunk * 8 : first + line / 64 * 64 + chunk * 8;
      octets[u] = load_octet(m, m.data + static_cast<int64_t>(down) * m.pitch + across, down < m.lines ? min(8, m.width - across) : 0);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int line = (base + u * kThreads) / 8, chunk = (base + u * kThreads) % 8;
      *reinterpret_cast<uint4*>(to + in_slab(line, chunk)) = octets[u];
    }
  }
}

}  // namespace fusible
