#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define WS_AVX2
#define WS_APPLY ws_apply_avx2
#include "apply.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
