/* CRC-32C by CPU instruction and in plain C: both match RFC 3720's values, and each other at every length. */
#include <stdio.h>
#include <stdlib.h>

#include "../src/checksum.h"

enum { MAX_SIZE = 300 };

int main(void) {
    const uint8_t digits[] = "123456789";
    uint8_t zeros[32] = {0};
    if (ws_crc32c_plain(digits, 9) != 0xE3069283u || ws_crc32c_plain(zeros, 32) != 0x8A9136AAu) {
        puts("test_checksum: plain C does not compute CRC-32C");
        return 1;
    }
    for (size_t size = 0; size <= MAX_SIZE; size++) {
        /* Of exactly this size, so that the sanitizer detects an overread. */
        uint8_t *data = malloc(size ? size : 1);
        for (size_t i = 0; i < size; i++) data[i] = (uint8_t)rand();
        const uint32_t fast = ws_crc32c(data, size), plain = ws_crc32c_plain(data, size);
        free(data);
        if (fast != plain) {
            printf("test_checksum: %zu bytes: instruction %08x, plain C %08x\n", size, fast, plain);
            return 1;
        }
    }
    puts("test_checksum: instruction equals plain C");
    return 0;
}
