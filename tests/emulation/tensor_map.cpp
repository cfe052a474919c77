#include "tensor_map.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "barrier.h"

namespace emulation {
namespace {

// What stands in the 128 bytes of a map.
struct Map {
  uint64_t magic, base;
  uint64_t strides[5];  // in bytes; of the innermost dimension the size of an element
  uint32_t last[5];     // size - 1 of each dimension
  uint16_t box[5];
  uint8_t rank, type;
  uint8_t span;  // bytes of a row that a swizzle permutes; 0: none
  uint64_t element() const { return strides[0]; }
};
static_assert(sizeof(Map) <= sizeof(CUtensorMap));
constexpr uint64_t kMagic = 0x70616D726F736E74;

Map read(const CUtensorMap* map) {
  check(reinterpret_cast<uintptr_t>(map) % 64 == 0, "a tensor map is not aligned to 64 bytes");
  Map m;
  std::memcpy(&m, map, sizeof m);
  check(m.magic == kMagic, "a copy uses a tensor map that was never encoded");
  return m;
}

// How often the maps in device memory were published.
std::map<const void*, uint64_t> publications;

template <class Change>
void change(CUtensorMap* map, Change change) {
  Map m;
  std::memcpy(&m, map, sizeof m);
  check(m.magic == kMagic, "a map is changed that was never encoded");
  change(m);
  std::memcpy(static_cast<void*>(map), &m, sizeof m);
}

uint64_t element_bytes(CUtensorMapDataType type) {
  if (type == CU_TENSOR_MAP_DATA_TYPE_UINT8) return 1;
  return type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 ? 2 : 0;
}

uint8_t span_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return 0;
  }
}

// Calls row(address of the row of the box, its offset in the box, how many of its bytes are within bounds: [from, to)) for every row of a
// box. Addresses wrap around modulo 2^64, as the engine's do.
template <class Row>
void each_row(const Map& m, const std::vector<int>& at, Row row) {
  const int64_t width = m.box[0], size = int64_t{m.last[0]} + 1, first = at[0];
  const int64_t from = std::clamp<int64_t>(-first, 0, width), to = std::clamp<int64_t>(size - first, 0, width);
  uint32_t rows = 1;
  for (int d = 1; d < m.rank; ++d) rows *= m.box[d];
  for (uint32_t i = 0; i < rows; ++i) {
    uint64_t address = m.base + static_cast<uint64_t>(first) * m.element();
    bool inside = from < to;
    uint32_t rest = i;
    for (int d = 1; d < m.rank; ++d) {
      const int64_t coordinate = int64_t{at[d]} + rest % m.box[d];
      rest /= m.box[d];
      inside &= coordinate >= 0 && coordinate <= m.last[d];
      address += static_cast<uint64_t>(coordinate) * m.strides[d];
    }
    row(address, i * width * m.element(), inside ? from * m.element() : 0, inside ? to * m.element() : 0);
  }
}

// The bytes [from, to) of a box, in the swizzled shared memory that begins at `shared`, in pieces that stay together.
template <class Piece>
void each_piece(uint32_t shared, uint64_t from, uint64_t to, Piece piece) {
  for (uint64_t at = from; at < to;) {
    const uint64_t end = std::min(to, at / 16 * 16 + 16);
    piece(shared_pointer(swizzled(shared + at), end - at), at, end - at);
    at = end;
  }
}

template <class T>
void add_values(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += sizeof(T)) {
    T x, y;
    std::memcpy(&x, to + i, sizeof(T)), std::memcpy(&y, from + i, sizeof(T));
    x = static_cast<T>(static_cast<float>(x) + static_cast<float>(y));
    std::memcpy(to + i, &x, sizeof(T));
  }
}

void write(const Map& m, uint8_t* to, const uint8_t* from, uint64_t bytes, bool add) {
  if (!add) std::memcpy(to, from, bytes);
  else if (m.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) add_values<float>(to, from, bytes);
  else if (m.type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) add_values<__half>(to, from, bytes);
  else add_values<__nv_bfloat16>(to, from, bytes);
}

Map checked(const CUtensorMap* map, const void* shared, size_t coordinates) {
  const Map m = read(map);
  if (const auto published = publications.find(map); published != publications.end())
    check(current->acquired[map] == published->second, "a copy uses a map that was published since this thread acquired it");
  check(m.rank == coordinates, "a map of ", int{m.rank}, " dimensions is addressed with ", coordinates, " coordinates");
  check(shared_address(shared) % 128 == 0, "a bulk copy's shared memory is not aligned to 128 bytes");
  return m;
}

}  // namespace

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                      const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const uint64_t element = element_bytes(type);
  Map m{.magic = kMagic, .base = reinterpret_cast<uint64_t>(base), .strides = {element}, .rank = static_cast<uint8_t>(rank), .type = static_cast<uint8_t>(type), .span = span_of(swizzle)};
  bool good = element && rank >= 1 && rank <= 5 && m.base % 16 == 0 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
              (m.span || swizzle == CU_TENSOR_MAP_SWIZZLE_NONE) && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;  // the only ones that are emulated
  for (uint32_t d = 0; good && d < rank; ++d) {
    good &= sizes[d] >= 1 && sizes[d] <= 1ull << 32 && box[d] >= 1 && box[d] <= 256 && element_strides[d] == 1;
    m.last[d] = static_cast<uint32_t>(sizes[d] - 1), m.box[d] = static_cast<uint16_t>(box[d]);
    if (d == 0) continue;
    good &= strides[d - 1] % 16 == 0 && strides[d - 1] < 1ull << 40;
    m.strides[d] = strides[d - 1];
  }
  good = good && box[0] * element % 16 == 0 && (!m.span || box[0] * element <= m.span);
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &m, sizeof m);
  return CUDA_SUCCESS;
}

void check_map(const CUtensorMap* map) { (void)read(map); }

void load_box(const CUtensorMap* map, uint64_t* barrier, void* to, uint32_t blocks, std::initializer_list<int> coordinates) {
  const Map m = checked(map, to, coordinates.size());
  check(m.span || *coordinates.begin() * static_cast<int64_t>(m.element()) % 16 == 0, "a bulk load without a swizzle begins at coordinate ", *coordinates.begin(),
        ", which is no multiple of 16 bytes");
  const uint64_t width = m.box[0] * m.element();
  check(!m.span || width == m.span, "only boxes as wide as their swizzle are emulated");
  const auto& cluster = current->block->cluster->blocks;
  const uint32_t shared = shared_address(to);
  int64_t total = 0;
  bool reads = false;
  for (uint32_t rank = 0; blocks >> rank; ++rank) {
    if (!(blocks >> rank & 1)) continue;
    check(rank < cluster.size(), "a multicast to block ", rank, " of a cluster of ", cluster.size());
    total = 0;
    each_row(m, coordinates, [&](uint64_t address, uint64_t offset, uint64_t from, uint64_t end) {
      if (from < end) check_memory(address + from, end - from, "a bulk load"), reads = true;
      for (uint64_t at = 0; at < width; at += 16) {  // what a swizzle keeps together
        const uint32_t linear = static_cast<uint32_t>(shared + offset + at);
        uint8_t* target = shared_pointer(*cluster[rank], m.span ? swizzled(linear, m.span) : linear, 16);
        const uint64_t first = std::clamp(from, at, at + 16), last = std::clamp(end, at, at + 16);
        std::memset(target, 0, 16);
        if (first < last) std::memcpy(target + (first - at), reinterpret_cast<const void*>(address + first), last - first);
      }
      total += width;
    });
    complete_bytes(mapped(barrier, rank), total);
  }
  if (!reads) check_memory(m.base, 1, "a bulk load out of bounds");  // where a GPU was seen to stop if nothing is there
}

void store_box(const CUtensorMap* map, const void* from, bool add, std::initializer_list<int> coordinates) {
  const Map m = checked(map, from, coordinates.size());
  check(m.span == 128, "only stores with a swizzle of 128 bytes are emulated");
  const std::vector<int> at = coordinates;
  const uint32_t shared = shared_address(from);
  current->stores.open.push_back([=] {
    each_row(m, at, [&](uint64_t address, uint64_t offset, uint64_t first, uint64_t end) {
      if (first >= end) return;
      check_memory(address + first, end - first, "a bulk store", true);
      each_piece(shared, offset + first, offset + end, [&](const uint8_t* piece, uint64_t position, uint64_t bytes) {
        write(m, reinterpret_cast<uint8_t*>(address + (position - offset)), piece, bytes, add);
      });
    });
  });
}

void set_map_address(CUtensorMap* map, const void* address) {
  const uint64_t base = reinterpret_cast<uint64_t>(address);
  check(base % 16 == 0, "the address of a map is not aligned to 16 bytes");
  change(map, [&](Map& m) { m.base = base; });
}
void set_map_size(CUtensorMap* map, int dimension, uint32_t size) {
  check(size > 0, "a map of size 0");
  change(map, [&](Map& m) { m.last[dimension] = size - 1; });
}
void set_map_pitch(CUtensorMap* map, uint64_t bytes) {
  check(bytes % 16 == 0 && bytes < 1ull << 40, "the pitch of a map is ", bytes, " bytes");
  change(map, [&](Map& m) { m.strides[1] = bytes; });
}
void publish_map(CUtensorMap* to, const CUtensorMap* from) {
  check(reinterpret_cast<uintptr_t>(to) % 128 == 0, "a map is published at an address that is not a multiple of 128");
  check_memory(reinterpret_cast<uint64_t>(to), sizeof *to, "the publication of a map");
  std::memcpy(static_cast<void*>(to), from, sizeof *to);
  ++publications[to];
}
void acquire_map(const CUtensorMap* map) {
  const auto published = publications.find(map);
  check(published != publications.end(), "a map is acquired that was never published");
  current->acquired[map] = published->second;
}

}  // namespace emulation
