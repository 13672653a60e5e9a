"""Where ranks, layers and parameters lie: pure arithmetic."""
