/* CRC-32C by the processor's instruction and in plain C: what RFC 3720 gives, and equal to one another at every length. */
#include <stdio.h>
#include <stdlib.h>

#include "../src/checksum.h"

enum { LONGEST = 300 };

int main(void) {
    const uint8_t digits[] = "123456789";
    uint8_t zeros[32] = {0};
    if (ws_crc32c_plain(digits, 9) != 0xE3069283u || ws_crc32c_plain(zeros, 32) != 0x8A9136AAu) {
        puts("not CRC-32C");
        return 1;
    }
    for (size_t size = 0; size <= LONGEST; size++) {
        /* Of this size exactly, so that the sanitizer sees a byte too far. */
        uint8_t *data = malloc(size ? size : 1);
        for (size_t i = 0; i < size; i++) data[i] = (uint8_t)rand();
        const uint32_t fast = ws_crc32c(data, size), plain = ws_crc32c_plain(data, size);
        free(data);
        if (fast != plain) {
            printf("%zu bytes: %08x and %08x\n", size, fast, plain);
            return 1;
        }
    }
    puts("checksums agree");
    return 0;
}
