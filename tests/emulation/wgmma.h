// Products of a warpgroup. They are carried out when the warpgroup waits for them, by the last thread that comes.
#pragma once
#include "fibers.h"

namespace emulation {

void wait_for_products(int newest);

}  // namespace emulation
