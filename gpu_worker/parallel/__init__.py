"""One replica in several processes: shards and stages, the links between them, and how they find each other."""
