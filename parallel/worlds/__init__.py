"""How ranks talk: worlds, groups, and the mesh of one rank."""
