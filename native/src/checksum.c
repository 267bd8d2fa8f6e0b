#include "checksum.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

/* tables[k][b]: contribution of byte b to the checksum if k more bytes follow it in a word of eight. */
static uint32_t tables[8][256];
static bool has_instruction;

__attribute__((constructor)) static void build_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
        tables[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++) {
            const uint32_t before = tables[k - 1][byte];
            tables[k][byte] = before >> 8 ^ tables[0][before & 255];
        }
#if defined(__x86_64__)
    has_instruction = __builtin_cpu_supports("sse4.2");
#elif defined(__ARM_FEATURE_CRC32)
    has_instruction = true;
#endif
}

uint32_t ws_crc32c_plain(const uint8_t *data, size_t size) {
    uint32_t crc = UINT32_MAX;
    for (; size >= 8; size -= 8, data += 8) {
        uint32_t next = 0;
        for (int k = 0; k < 8; k++) next ^= tables[7 - k][data[k] ^ (k < 4 ? crc >> 8 * k & 255 : 0)];
        crc = next;
    }
    for (; size; size--) crc = crc >> 8 ^ tables[0][(crc ^ *data++) & 255];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t with_instruction(const uint8_t *data, size_t size) {
    uint64_t crc = UINT32_MAX, word;
    for (; size >= 8; size -= 8, data += 8) {
        memcpy(&word, data, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    for (; size; size--) crc = _mm_crc32_u8((uint32_t)crc, *data++);
    return ~(uint32_t)crc;
}
#elif defined(__ARM_FEATURE_CRC32)
static uint32_t with_instruction(const uint8_t *data, size_t size) {
    uint32_t crc = UINT32_MAX;
    uint64_t word;
    for (; size >= 8; size -= 8, data += 8) {
        memcpy(&word, data, 8);
        crc = __crc32cd(crc, word);
    }
    for (; size; size--) crc = __crc32cb(crc, *data++);
    return ~crc;
}
#else
#define with_instruction ws_crc32c_plain
#endif

uint32_t ws_crc32c(const uint8_t *data, size_t size) {
    return has_instruction ? with_instruction(data, size) : ws_crc32c_plain(data, size);
}
