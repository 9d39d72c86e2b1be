"""Two towers on a stream of events, a folder of Parquet files a day."""
