// What most sources of csrc include, which build.py has read once for all of them: that is most of what a small one takes.
#pragma once
#include "cuda_language.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <sstream>
#include <vector>
