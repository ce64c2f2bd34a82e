// SPDX-License-Identifier: Apache-2.0
package dev.cremant.fs;

import java.io.IOException;
import java.net.URI;
import java.net.URISyntaxException;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.DelegateToFileSystem;
import org.apache.hadoop.fs.FsConstants;

/** {@link QuickLocalFileSystem} for callers of Hadoop's FileContext, such as Spark's checkpoints. */
public class QuickLocalFs extends DelegateToFileSystem {

  public QuickLocalFs(URI uri, Configuration configuration) throws IOException, URISyntaxException {
    super(uri, new QuickLocalFileSystem(), configuration, FsConstants.LOCAL_FS_URI.getScheme(), false);
  }

  @Override
  public int getUriDefaultPort() {
    return -1;
  }

  @Override
  public boolean isValidName(String source) {
    // Colons and the like are legal in names of local files.
    return true;
  }
}
