"""Exchange models with other libraries."""
