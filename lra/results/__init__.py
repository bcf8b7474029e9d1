"""Results: records to statistics, tables, figures, a page. Knows tasks, and speed's records."""
