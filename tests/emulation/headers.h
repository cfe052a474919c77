// What most sources of csrc include, and functions of users, which build.py has read once for all of them: that is most of what
// a small one takes.
#pragma once
#include "cuda_language.h"

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "device/epilogue/epilogue_activation.cuh"
#include "device/epilogue/epilogue_activation_backward.cuh"
#include "device/epilogue/epilogue_quantized_activation.cuh"
#include "device/functions/pointwise_rows.cuh"
#include "device/quantize/quantize_activation.cuh"
#include "kernels/gemm/operand_types.cuh"
