/* What the daemon asks of a CRIU that dumps, and what it is answered, about pages that were not written: two files in the
 * directory of images, of records that sandbox/criu/tracking/orders.py packs and unpacks. */
#ifndef PAGURUS_TRACKED_H
#define PAGURUS_TRACKED_H

#include <stdint.h>

#define ORDERS "tracked-orders.log"
#define ANSWERS "tracked-answers.log"
#define LETTERS "tracked-letters.log" /* of sandbox/criu/tracking/mapping_flags.py */
#define MAX_ORDERS 65536

enum order {
    ATTACH = 1,  /* make it a userfaultfd */
    PROTECT = 2, /* protect its pages as they are read, so that the next dump knows which were written */
    SKIP = 4,    /* leave the pages out that were not written since they were protected */
};
struct order_record {
    int32_t pid;
    uint32_t what;
};

enum answer {
    DESCRIPTOR = 1, /* `start` is that of a userfaultfd, in CRIU */
    UNWRITTEN = 2,  /* the pages from `start` to `end` were left out */
    READ = 3,       /* the pages from `start` to `end` were looked at, and are protected now */
    FAILED = 4,     /* ... could not be protected: nothing is known of what the process writes from now on */
    BRIEF = 5,   /* its mappings were told without counting their pages */
};
struct answer_record {
    int32_t pid;
    uint32_t what;
    uint64_t start, end;
};

#endif
