// Compiles the file named by EAGLE2_KERNEL once for each instruction set, each in its namespace.
// No include guard: one inclusion per kernel. Templates get the instruction set of the place where
// they are defined, so what a kernel calls has to be defined in it or be always inlined.
#include "cpu/simd.h"

namespace eagle2::cpu::portable {
#include "cpu/simd_portable.h"
#include EAGLE2_KERNEL
}  // namespace eagle2::cpu::portable

#if EAGLE2_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace eagle2::cpu::avx2 {
#include "cpu/simd_avx2.h"
#include EAGLE2_KERNEL
}  // namespace eagle2::cpu::avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                    \
    __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
namespace eagle2::cpu::avx512 {
#include "cpu/simd_avx512.h"
#include EAGLE2_KERNEL
}  // namespace eagle2::cpu::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
