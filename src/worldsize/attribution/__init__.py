"""Why a run was slower than its network could be computed: where its time went, the causes, and remedies."""
