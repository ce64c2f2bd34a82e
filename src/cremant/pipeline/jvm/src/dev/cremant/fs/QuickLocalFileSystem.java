// SPDX-License-Identifier: Apache-2.0
package dev.cremant.fs;

import java.io.File;
import java.io.IOException;
import org.apache.hadoop.fs.FileStatus;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/**
 * The local file system without forks. Without native Hadoop libraries the stock one starts a
 * process (chmod, readlink) for every file it creates or renames, which costs an epoch about 100 ms.
 * Permissions are what the umask of the process says; symbolic links are followed, not reported;
 * there are no .crc side files. Everything else, also what survives a kill, is as in the stock one.
 */
public class QuickLocalFileSystem extends RawLocalFileSystem {

  @Override
  public void setPermission(Path path, FsPermission permission) {
    // The umask of the process decides.
  }

  @Override
  protected boolean mkOneDirWithMode(Path path, File file, FsPermission permission) throws IOException {
    return file.mkdir();
  }

  @Override
  public FileStatus getFileLinkStatus(Path path) throws IOException {
    return getFileStatus(path);
  }

  @Override
  public boolean supportsSymlinks() {
    return false;
  }
}
