"""Model configurations, presets, blocks and the builder."""
