// SPDX-License-Identifier: Apache-2.0
// Operands that TMA cannot reach, fetched by ordinary loads into the layout that it would have made of them
// (operands.cuh).
#pragma once
#include "device/gemm/ragged_groups.cuh"

namespace fusible {

// 64 values of a line that runs along the contiguous dimension are 128 bytes of shared memory. K-major: a line is a row
// of the operand; MN-major: a value of k, in blocks of 64 columns.
struct NoTmaMatrix {
  const uint16_t *begin, *end;  // bounds of the tensor, outside of which nothing is read
  // The 16 aligned bytes at its beginning and at its end, with zeros for bytes outside of it.
  const uint4* edges;
  const uint16_t* data;     // of the group
  int pitch, lines, width;  // the group's lines, and values per line
  bool k_major;
};

// Loads 16 aligned bytes, at least two of them in the tensor.
DEVICE uint4 load_aligned(const NoTmaMatrix& m, const uint16_t* from) {
  const auto* at = reinterpret_cast<const uint4*>(from);
  return __ldg(from < m.begin ? m.edges : from + 8 > m.end ? m.edges + 1 : at);
}

// The 16 bytes that begin `shift` bytes (an even number below 16) within x, the rest from y; of their 8 values the
// first `count`.
DEVICE uint4 shifted(const uint4& x, const uint4& y, int shift, int count) {
  uint32_t w[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 6; ++i) w[i] = shift & 8 ? w[i + 2] : w[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) w[i] = shift & 4 ? w[i + 1] : w[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = __byte_perm(w[i], w[i + 1], shift & 2 ? 0x5432 : 0x3210);
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = count >= 2 * i + 2 ? w[i] : count > 2 * i ? w[i] & 0xFFFF : 0;
  return {w[0], w[1], w[2], w[3]};
}

DEVICE uint4 shuffle(const uint4& x, int lane) {
  return {__shfl_sync(~0u, x.x, lane), __shfl_sync(~0u, x.y, lane), __shfl_sync(~0u, x.z, lane),
          __shfl_sync(~0u, x.w, lane)};
}

// `lines` lines of 64 values to a stage, by whole warps; this is thread `thread` of kThreads. `first`
// is the first row or column of the tile, `k` the first value of the depth. Eight lanes fetch four lines at a time
// (more would spill): each lane the 16 aligned bytes in which its vector of a line begins, which the lane before needs
// too where lines are not aligned; and of one of the lines those in which it ends.
template <int kThreads>
DEVICE void copy_shifted(const NoTmaMatrix& m, uint8_t* to, int lines, int first, int k, int thread) {
  constexpr int kAtOnce = 4, kLines = kThreads / 8;
  static_assert(64 % (kLines * kAtOnce) == 0 && kAtOnce <= 8, "lines of one block at a time");
  const int chunk = thread % 8, lane = thread % 32, step = kLines * m.pitch;
#pragma unroll 1
  for (int base = thread / 8; base < lines; base += kLines * kAtOnce) {
    const int down = m.k_major ? first + base : k + base % 64, across = m.k_major ? k : first + base / 64 * 64;
    // Lines, and values of each, from this thread's first on.
    const int exist = m.lines - down, left = m.width - across - chunk * 8;
    const uint16_t* from = m.data + static_cast<int64_t>(down) * m.pitch + across;
    // Whether something of the 16 bytes in which a vector begins is needed.
    const auto begins = [&](const uint16_t* vector, int line, int values) {
      const int before = reinterpret_cast<uintptr_t>(vector) / 2 % 8;  // of the vector before
      return line < exist && values + before > 0;
    };
    const auto aligned = [](const uint16_t* x) {
      return reinterpret_cast<const uint16_t*>(reinterpret_cast<uintptr_t>(x) / 16 * 16);
    };
    uint4 vectors[kAtOnce], end = {0, 0, 0, 0};
    const uint16_t* const last = from + static_cast<int64_t>(chunk) * step + 64;
    if (chunk < kAtOnce && begins(last, chunk * kLines, m.width - across - 64)) end = load_aligned(m, aligned(last));
    from += chunk * 8;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const uint16_t* const vector = from + static_cast<int64_t>(u) * step;
      vectors[u] = {0, 0, 0, 0};
      if (begins(vector, u * kLines, chunk > 0 ? left : left > 0 ? left : -8))
        vectors[u] = load_aligned(m, aligned(vector));
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(from + static_cast<int64_t>(u) * step) & 15);
      const uint4 next = shuffle(vectors[u], (lane + 1) % 32), at_end = shuffle(end, lane / 8 * 8 + u);
      *reinterpret_cast<uint4*>(to + in_subtile(base + u * kLines, chunk)) =
          shifted(vectors[u], chunk == 7 ? at_end : next, shift, left);
    }
  }
}

// The same where all lines begin at multiples of four bytes: a warp a line, two values a lane, straight to shared
// memory. Complete when the thread has waited for its copies.
DEVICE bool has_pairs(const NoTmaMatrix& m) { return reinterpret_cast<uintptr_t>(m.data) % 4 == 0 && m.pitch % 2 == 0; }
template <int kThreads>
DEVICE void cp_async_pairs(const NoTmaMatrix& m, uint8_t* to, int lines, int first, int k, int thread) {
  const int lane = thread % 32;
#pragma unroll 1
  for (int base = thread / 32 * 8; base < lines; base += kThreads / 32 * 8) {
    const int down = m.k_major ? first + base : k + base % 64,
              across = (m.k_major ? k : first + base / 64 * 64) + lane * 2;
    const int exist = m.lines - down, bytes = min(4, max(0, m.width - across) * 2);
    const uint16_t* from = m.data + static_cast<int64_t>(down) * m.pitch + across;
#pragma unroll
    for (int u = 0; u < 8; ++u, from += m.pitch)
      ptx::copy_async_pair(to + in_subtile(base + u, lane / 4) + lane % 4 * 4, from, u < exist ? bytes : 0);
  }
}

}  // namespace fusible
