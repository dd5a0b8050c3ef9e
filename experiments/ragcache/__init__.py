"""RAGCache's figures and tables (arXiv:2404.12457), one file each."""
