// Drawing one row at a time: what sample and accept share.
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/filters.h"
#include "cpu/operators.h"

namespace eagle2::cpu {

struct SampleScratch {
  std::vector<float> x, mass;         // [V], up to a whole group
  std::vector<unsigned char> logits;  // a row whose elements lie apart
  FilterScratch filter;
};

// Reading, filtering and drawing, in accesses of an element.
constexpr int64_t kAccessesPerLogit = 4;

// The token after node `node` of row `row`, -1 where no logit is live.
int64_t draw(const SampleRows& rows, int64_t row, int64_t node, SampleScratch& scratch);

// The calling thread's own, kept: half a megabyte of fresh pages costs as much as the drawing.
SampleScratch& sample_scratch();

}  // namespace eagle2::cpu
