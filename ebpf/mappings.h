/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mappings of a process with their flags, for a dump: /proc/PID/smaps counts all pages to tell them, which takes as
 * long as there is memory. sandbox/native/written.c runs it, for one process, and makes the text of smaps of it.
 */
#ifndef PAGURUS_MAPPINGS_H
#define PAGURUS_MAPPINGS_H

struct mapping {
	u64 start, end, flags;
};

SEC("iter/task_vma")
int tell_mappings(struct bpf_iter__task_vma *ctx)
{
	struct vm_area_struct *vma = ctx->vma;
	struct mapping found;

	if (!vma)
		return 0;
	found.start = vma->vm_start;
	found.end = vma->vm_end;
	found.flags = vma->vm_flags;
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}

#endif
