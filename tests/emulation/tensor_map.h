// Tensor maps and the bulk copies that follow them.
#pragma once
#include <cuda.h>

#include "fibers.h"

namespace emulation {

// The emulated cuTensorMapEncodeTiled.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes, const cuuint64_t* strides,
                      const cuuint32_t* box, const cuuint32_t* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

void check_map(const CUtensorMap* map);
// One box at `coordinates` to the shared memory of every block of the cluster in `blocks`, completing on their barriers.
void load_box(const CUtensorMap* map, uint64_t* barrier, void* to, uint32_t blocks, std::initializer_list<int> coordinates);
// One box from shared memory; carried out when the thread waits for it.
void store_box(const CUtensorMap* map, const void* from, bool add, std::initializer_list<int> coordinates);

// A map in shared memory is changed, then stored to device memory. From then on it may be used there by the threads that have acquired it.
void set_map_address(CUtensorMap* map, const void* address);
void set_map_size(CUtensorMap* map, int dimension, uint32_t size);
void set_map_pitch(CUtensorMap* map, uint64_t bytes);
void publish_map(CUtensorMap* to, const CUtensorMap* from);
void acquire_map(const CUtensorMap* map);

}  // namespace emulation
