// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fusible {

inline constexpr int kScaleBlock = 128;  // values that share a scale, along the depth of a product

}  // namespace fusible
