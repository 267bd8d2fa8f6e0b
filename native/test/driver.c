/* Replaces libFuzzer if there is no clang. Runs the fuzz target on every file of a folder, then on damaged copies of them.
   Usage: driver FOLDER SECONDS [SEED]. FOLDER.last holds the current input, so that a crash can be reproduced. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_FILES = 1024, MAX_BYTES = 1 << 17 };

static uint8_t *files[MAX_FILES];
static size_t sizes[MAX_FILES];
static int count;
static uint64_t state;

static uint32_t draw(uint32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return n ? (uint32_t)(state >> 33) % n : 0;
}

static void read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return;
    files[count] = malloc(MAX_BYTES);
    sizes[count] = fread(files[count], 1, MAX_BYTES, file);
    fclose(file);
    count++;
}

static void read_folder(const char *folder) {
    DIR *directory = opendir(folder);
    char path[4096];
    for (const struct dirent *entry; directory && count < MAX_FILES && (entry = readdir(directory));) {
        struct stat info;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (stat(path, &info) == 0 && S_ISREG(info.st_mode)) read_file(path);
    }
    if (directory) closedir(directory);
}

/* Position of the next marker after a random position, or a random position if there is none. */
static size_t marker(const uint8_t *data, size_t size) {
    for (size_t at = draw((uint32_t)size), tries = 0; tries < size; at = (at + 1) % size, tries++)
        if (data[at] == 0xFF) return at;
    return draw((uint32_t)size);
}

static size_t damage(uint8_t *data, size_t size) {
    static const uint8_t special[] = {0, 1, 0x7F, 0x80, 0xFE, 0xFF, 0xC0, 0xC2, 0xC4, 0xD0, 0xD8, 0xD9, 0xDA, 0xDB, 0xDD};
    const size_t at = draw(2) ? draw((uint32_t)size) : (marker(data, size) + draw(12)) % size;
    const size_t rest = size - at, length = 1 + draw((uint32_t)(rest < 200 ? rest : 200)) % rest;
    switch (draw(7)) {
    case 0: data[at] ^= (uint8_t)(1 << draw(8)); break;
    case 1: data[at] = (uint8_t)draw(256); break;
    case 2: data[at] = special[draw(sizeof special)]; break;
    case 3: memmove(data + at, data + at + length, rest - length); return size - length ? size - length : 1;
    case 4: return draw(3) ? size : at + 1;
    case 5: {
        const int other = (int)draw((uint32_t)count);
        const size_t from = draw((uint32_t)sizes[other]), left = sizes[other] - from;
        memcpy(data + at, files[other] + from, left < length ? left : length);
        break;
    }
    default: data[at] = 0xFF; data[(at + 1) % size] = (uint8_t)(0xC0 + draw(64)); break;
    }
    return size;
}

static void run_one(const char *folder, const uint8_t *data, size_t size) {
    char path[4096];
    snprintf(path, sizeof path, "%s.last", folder);
    FILE *file = fopen(path, "wb");
    if (file) {
        fwrite(data, 1, size, file);
        fclose(file);
    }
    LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv) {
    if (argc < 3) return 64;
    const time_t end = time(NULL) + atoi(argv[2]);
    state = argc > 3 ? strtoull(argv[3], NULL, 10) : (uint64_t)time(NULL);
    printf("fuzz: seed %llu\n", (unsigned long long)state);
    fflush(stdout);
    read_folder(argv[1]);
    if (!count) return 66;
    for (int i = 0; i < count; i++) run_one(argv[1], files[i], sizes[i]);
    uint8_t *data = malloc(MAX_BYTES);
    long runs = 0;
    for (; time(NULL) < end; runs++) {
        const int one = (int)draw((uint32_t)count);
        size_t size = sizes[one];
        if (!size) continue;
        memcpy(data, files[one], size);
        for (uint32_t times = 1 + draw(6); times; times--) size = damage(data, size);
        /* Without an end marker, ws_sniff would reject it at once. */
        if (size >= 2 && draw(4)) memcpy(data + size - 2, "\xFF\xD9", 2);
        run_one(argv[1], data, size);
    }
    printf("fuzz: %d files, %ld damaged copies, no defect\n", count, runs);
    free(data);
    for (int i = 0; i < count; i++) free(files[i]);
    return 0;
}
