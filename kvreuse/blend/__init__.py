"""Selective recompute: cache, selectors, schedule, fusor."""
