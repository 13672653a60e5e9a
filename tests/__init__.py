"""Tests, by what they need: pure (no torch), ranks (threads), processes (Gloo), gpu, pages (a browser)."""
