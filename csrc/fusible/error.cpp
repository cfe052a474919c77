// SPDX-License-Identifier: Apache-2.0
#include "fusible/error.h"

#include <sstream>
#include <stdexcept>

namespace fusible {
namespace {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace

void Part::write(std::ostream& out) const {
  if (write_) write_(out, value_);
  else if (value_) out << static_cast<const char*>(value_);
  else out << number_;
}

void fail(const char* text) { throw Error(text); }

void fail(const char* file, int line, const char* condition, std::initializer_list<Part> parts) {
  std::ostringstream text;
  for (const Part& part : parts) part.write(text);
  text << " [" << condition << " at " << file << ":" << line << "]";
  throw Error(text.str());
}

}  // namespace fusible
