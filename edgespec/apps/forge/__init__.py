"""Making drafts: what `edgespec draft make` runs (docs/drafts.md)."""
